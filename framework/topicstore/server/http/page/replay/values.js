/* The numbers in payloads as lines over time, one for each topic. */

import { readAddress, addressOf } from '../address.js';
import { chart } from '../charts.js';
import { find, make } from '../elements.js';
import { count, counted } from '../format.js';
import { leaves, numberOf } from '../payloads/payloads.js';
import { span } from '../time.js';

/* The largest number of lines that a reader can distinguish. */
const LINES = 6;
const WHOLE = '(the payload)';
/* Last words of names: of times, which are not values, and of numbers that name something. */
const TIMES = new Set(['ts', 'time', 'timestamp', 'stamp', 'datetime', 'date', 'epoch', 'at', 'now', 'utc', 'uptime']);
const NAMES = new Set(['id', 'ids', 'uid', 'uuid', 'guid', 'seq', 'sequence', 'no', 'nr', 'version', 'port']);

/* The last word of a path, as "at" of `reading.createdAt` and "id" of `vehicle_id`; "humid" is one word. */
const lastWord = (path) => path.replace(/([a-z0-9])([A-Z])/g, '$1 $2').split(/[^A-Za-z0-9]+/).filter(Boolean).at(-1)?.toLowerCase() ?? '';

/* How often each field has a number that is no time. */
const numberFields = (rows) => {
  const found = new Map();
  for (const { json } of rows) {
    if (json === undefined) continue;
    for (const [path, value] of leaves(json)) {
      if (numberOf(value) !== undefined && !TIMES.has(lastWord(path))) found.set(path, (found.get(path) ?? 0) + 1);
    }
  }
  return found;
};

const valueAt = (json, field) => {
  if (json === undefined) return undefined;
  for (const [path, value] of leaves(json)) if (path === field) return numberOf(value);
  return undefined;
};

/* The field that most messages have, but rather a value than a number that names something. */
const likely = (fields) => {
  const all = [...fields].sort(([, a], [, b]) => b - a).map(([path]) => path);
  return all.find((path) => !NAMES.has(lastWord(path))) ?? all[0];
};

const linesOf = (rows, field) => {
  const lines = new Map();
  for (const { row, json } of rows) {
    const value = valueAt(json, field);
    if (value === undefined) continue;
    if (!lines.has(row.topic)) lines.set(row.topic, []);
    lines.get(row.topic).push([row.timestamp / 1000, value]);
  }
  return [...lines].sort(([, a], [, b]) => b.length - a.length);
};

let drawn = [];
let part = 'newest';

/* Which messages are drawn: how many, which ones, and from when to when. */
const partOf = () => {
  const times = drawn.map(({ row }) => row.timestamp);
  const [from, until] = [times.reduce((a, b) => Math.min(a, b)), times.reduce((a, b) => Math.max(a, b))];
  return `${part === 'all' ? 'all' : `only the ${part}`} ${counted(drawn.length, 'message')}, ${span(from, until)}`;
};

const draw = (field) => {
  const all = linesOf(drawn, field);
  const lines = all.slice(0, LINES).map(([topic, points], at) => [topic, points.sort((a, b) => a[0] - b[0]), `--series-${at + 1}`]);
  find('values-legend').replaceChildren(...lines.map(([topic, , colour]) => {
    const key = make('span', { class: 'key topic' }, topic);
    key.style.setProperty('--key', `var(${colour})`);
    return key;
  }));
  find('values-summary').textContent = partOf()
    + (all.length > LINES ? `; a line for each of the ${LINES} topics with most messages, of ${count(all.length)}` : '');
  chart(find('values'), lines.map(([topic, points, colour]) => ({
    name: topic, x: points.map(([time]) => time), y: points.map(([, value]) => value), colour, dots: points.length < 100,
  })));
};

/** Show what numbers the rows have: a choice of fields, and the chosen one as lines; `which` names the rows: newest, oldest, all. */
export const showValues = (rows, which) => {
  drawn = rows;
  part = which;
  const fields = numberFields(rows);
  const { field: linked } = readAddress()[1];
  const chosen = fields.has(linked) ? linked : likely(fields);
  find('values').closest('article').hidden = fields.size === 0;
  if (fields.size === 0) return;
  find('field').replaceChildren(...[...fields.keys()].map((path) => {
    const option = make('option', { value: path }, path || WHOLE);
    option.selected = path === chosen;
    return option;
  }));
  draw(chosen);
};

find('field').addEventListener('change', ({ target }) => {
  const [view, values] = readAddress();
  history.replaceState(null, '', addressOf(view, { ...values, field: target.value }));
  draw(target.value);
});
