/* The numbers in payloads as lines over time, one for each topic. */

import { readAddress, addressOf } from '../address.js';
import { chart } from '../charts.js';
import { find, make } from '../elements.js';
import { count } from '../format.js';
import { leaves, numberOf } from './payloads.js';

const LINES = 8;
const WHOLE = '(the payload)';
const UNLIKELY = /(time|stamp|id|_at)$/i;

/* How often each field has a number. */
const numberFields = (rows) => {
  const found = new Map();
  for (const { json } of rows) {
    if (json === undefined) continue;
    for (const [path, value] of leaves(json)) if (numberOf(value) !== undefined) found.set(path, (found.get(path) ?? 0) + 1);
  }
  return found;
};

const valueAt = (json, field) => {
  if (json === undefined) return undefined;
  for (const [path, value] of leaves(json)) if (path === field) return numberOf(value);
  return undefined;
};

const likely = (fields) => [...fields.keys()].find((path) => !UNLIKELY.test(path)) ?? fields.keys().next().value;

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

const draw = (field) => {
  const all = linesOf(drawn, field);
  const lines = all.slice(0, LINES).map(([topic, points], at) => [topic, points.sort((a, b) => a[0] - b[0]), `--series-${at + 1}`]);
  find('values-legend').replaceChildren(...lines.map(([topic, , colour]) => {
    const key = make('span', { class: 'key topic' }, topic);
    key.style.setProperty('--key', `var(${colour})`);
    return key;
  }));
  find('values-summary').textContent = `of the ${count(drawn.length)} messages that were read`
    + (all.length > LINES ? `; the ${LINES} of ${count(all.length)} topics that have most of them` : '');
  chart(find('values'), lines.map(([topic, points, colour]) => ({
    name: topic, x: points.map(([time]) => time), y: points.map(([, value]) => value), colour, dots: points.length < 100,
  })));
};

/** Show what numbers the rows have: a choice of fields, and the chosen one as lines. */
export const showValues = (rows) => {
  drawn = rows;
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
