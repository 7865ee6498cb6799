/* The view "Replay": messages by filter and time, when they came, and the numbers in them. */

import { go, readAddress } from '../address.js';
import { chart } from '../charts.js';
import { find } from '../elements.js';
import { counted } from '../format.js';
import { showExports } from '../replay/export.js';
import { offerExplanation } from '../replay/explanation.js';
import { clearRows, putRows, rowsLeft, showNext, takeRows } from '../replay/rows.js';
import { tail } from '../replay/tail.js';
import { ask, parts, request } from '../server.js';
import { shownTime, span, typedTime, zoneName } from '../time.js';

const PAGE = 1000;
const NEXT = 'Topicstore-Next';
const BUCKETS = 120;
const form = find('replay-form');

/* A range of which less than this part has messages is drawn without the rest, unless it is no longer than a minute. */
const FILLED = 0.1;
const SHORT = 60e6;
const TIMES = ['start', 'until'];

const asked = () => Object.fromEntries([...new FormData(form)].map(([name, text]) => [name, TIMES.includes(name) ? typedTime(text) : text.trim()]));

const readPage = async (query, signal) => {
  const response = await request('/messages', { query: { ...query, limit: PAGE }, accept: 'application/x-ndjson', signal });
  const found = [];
  for await (const line of parts(response, '\n')) if (line) found.push(JSON.parse(line));
  return [found, response.headers.get(NEXT)];
};

/* Rows, and a button for the next ones: first those that were read, then those of the next page. */
const showRows = async (query, signal, trouble) => {
  const more = find('more');
  const end = query.reverse ? 'newest' : 'oldest';
  let whole = false;
  let following = query;
  const next = async () => {
    more.disabled = true;
    if (following && rowsLeft() === 0) {
      const [found, after] = await readPage(following, signal);
      whole = after === null;
      if (following === query) find('nothing').hidden = found.length > 0;
      following = takeRows(found, whole ? 'all' : end) && !whole ? { after } : null;
    }
    showNext(following !== null);
    more.hidden = rowsLeft() === 0 && following === null;
    more.disabled = false;
  };
  clearRows();
  more.hidden = true;
  more.onclick = () => next().catch(trouble);
  await next();
};

/* The counts of a range, or of the part of it that has messages where that is small, as after a beginning in 1970. */
const countsOf = async (query, signal) => {
  const found = await ask('/messages/histogram', { ...query, buckets: BUCKETS }, { signal });
  const first = found.counts.findIndex((number) => number > 0);
  const last = found.counts.findLastIndex((number) => number > 0);
  if (first < 0 || found.width * found.counts.length <= SHORT || (last - first + 1) / found.counts.length >= FILLED) return found;
  const [from, until] = [first, last + 1].map((at) => found.start + at * found.width);
  return countsOf({ ...query, start: from, until }, signal);
};

const showHistogram = async ({ filter, start, until, by }, values, signal) => {
  const summary = find('histogram-summary');
  summary.textContent = '';
  const everything = by === 'timestamp' && Boolean(start || until);  // times of storing are all that is counted
  const found = await countsOf(everything ? { filter } : { filter, start, until }, signal);
  const { counts, width } = found;
  const end = found.start + counts.length * width;
  find('histogram').closest('article').hidden = found.messages === 0;
  if (found.messages === 0) return;
  summary.textContent = `${found.exact ? '' : 'about '}${counted(found.messages, 'message')}, stored from ${span(found.start, end)}${everything ? ', whatever their own times' : ''}; mark a part to look into it`;
  chart(find('histogram'), [{
    name: 'messages',
    bars: true,
    colour: '--in',
    x: counts.map((_, at) => (found.start + (at + 0.5) * width) / 1000),
    y: counts,
    widths: width / 1000,
  }], {
    fromZero: true,
    range: [found.start / 1000, end / 1000],
    onrange: (from, to) => go('replay', { ...values, by: 'position', start: Math.floor(from * 1000), until: Math.ceil(to * 1000) }),
  });
};

const showLive = async (filter, signal, trouble) => {
  clearRows();
  find('more').hidden = true;
  await tail(filter, signal, putRows, trouble);
};

/** Show the view until the signal ends it. */
export const replay = async (values, signal, trouble) => {
  for (const field of form.elements) if (field.name) field.value = values[field.name] ?? field.dataset.default ?? '';
  for (const name of TIMES) form.elements[name].value = shownTime(values[name]);
  find('replay-times').textContent = `Times are read in ${zoneName()}: 2025-06-01 12:00, or -2h for two hours ago. `;
  const live = values.live === 'yes';
  find('live').setAttribute('aria-pressed', live);
  for (const part of document.querySelectorAll('#view-replay .of-the-past')) part.hidden = live;
  const { filter, by, order } = asked();
  const [start, until] = TIMES.map((name) => typedTime(values[name] ?? ''));
  find('nothing').hidden = true;
  if (live) {
    await showLive(filter || '#', signal, trouble);
    return;
  }
  const query = { filter: filter || '#', start, until, by };
  showExports(query, trouble);
  offerExplanation(query, signal, trouble);
  await Promise.all([
    showRows({ ...query, reverse: order === 'newest' }, signal, trouble),
    showHistogram(query, values, signal),
  ]);
};

form.addEventListener('submit', (event) => {
  event.preventDefault();
  const { field } = readAddress()[1];
  go('replay', { ...asked(), field });
});

find('live').addEventListener('click', () => {
  const live = find('live').getAttribute('aria-pressed') !== 'true';
  go('replay', { ...asked(), live: live ? 'yes' : '' });
});
