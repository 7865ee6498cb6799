/* The view "Replay": messages by filter and time, when they came, and the numbers in them. */

import { go, readAddress } from '../address.js';
import { chart } from '../charts.js';
import { find } from '../elements.js';
import { count } from '../format.js';
import { showExports } from '../replay/export.js';
import { offerExplanation } from '../replay/explanation.js';
import { clearRows, putRows, rowsLeft, showNext, takeRows } from '../replay/rows.js';
import { tail } from '../replay/tail.js';
import { ask, parts, request } from '../server.js';

const PAGE = 1000;
const NEXT = 'Topicstore-Next';
const BUCKETS = 120;
const form = find('replay-form');

const asked = () => Object.fromEntries([...new FormData(form)].map(([name, text]) => [name, text.trim()]));

const readPage = async (query, signal) => {
  const response = await request('/messages', { query: { ...query, limit: PAGE }, accept: 'application/x-ndjson', signal });
  const found = [];
  for await (const line of parts(response, '\n')) if (line) found.push(JSON.parse(line));
  return [found, response.headers.get(NEXT)];
};

/* Rows, and a button for the next ones: first those that were read, then those of the next page. */
const showRows = async (query, signal, trouble) => {
  const more = find('more');
  let following = query;
  const next = async () => {
    more.disabled = true;
    if (following && rowsLeft() === 0) {
      const [found, after] = await readPage(following, signal);
      following = takeRows(found) && after !== null ? { after } : null;
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

const showHistogram = async ({ filter, start, until }, values, signal) => {
  const summary = find('histogram-summary');
  summary.textContent = '';
  const found = await ask('/messages/histogram', { filter, start, until, buckets: BUCKETS }, { signal });
  const { counts, width } = found;
  summary.textContent = found.messages === 0 ? 'nothing is there'
    : `${found.exact ? '' : 'about '}${count(found.messages)} messages, by the time of storing; mark a part to look into it`;
  chart(find('histogram'), [{
    name: 'messages',
    bars: true,
    colour: '--in',
    x: counts.map((_, at) => (found.start + (at + 0.5) * width) / 1000),
    y: counts,
    widths: width / 1000,
  }], {
    fromZero: true,
    range: [found.start / 1000, (found.start + counts.length * width) / 1000],
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
  const live = values.live === 'yes';
  find('live').setAttribute('aria-pressed', live);
  for (const part of document.querySelectorAll('#view-replay .of-the-past')) part.hidden = live;
  const { filter, start, until, by, order } = asked();
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
