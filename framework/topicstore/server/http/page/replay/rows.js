/* The list of messages: a page at a time, never more than a browser shows with ease. */

import { find, make } from '../elements.js';
import { count } from '../format.js';
import { onPayloadForm } from '../payloads/form.js';
import { jsonOf, shownPayload } from '../payloads/payloads.js';
import { clock, moment } from '../time.js';
import { showValues } from './values.js';

/* How many are shown at once, and the most that are kept. */
const STEP = 100;
const MOST = 5000;

let rows = [];
let shown = 0;

const item = ({ row, json }) => make('li', {},
  make('time', { class: 'when' }, moment(row.timestamp)),
  make('div', {},
    make('span', { class: 'topic' }, row.topic), ' ',
    make('span', { class: 'from' }, [row.client_id && `from ${row.client_id}`, `QoS ${row.qos}`, row.retain && 'retained'].filter(Boolean).join(', ')),
    shownPayload(row, json)));

const read = (found) => found.map((row) => ({ row, json: jsonOf(row) }));

/** Forget the messages that are shown. */
export const clearRows = () => {
  rows = [];
  shown = 0;
  find('rows').replaceChildren();
  find('rows-summary').textContent = '';
};

/** Take more messages, to be shown by `showNext`; `which` names those that were taken, as "newest". Returns whether
 * there is room for more after these. */
export const takeRows = (found, which) => {
  rows.push(...read(found));
  showValues(rows, which);
  return rows.length < MOST;
};

/** Return how many of the messages that were taken are not shown yet. */
export const rowsLeft = () => rows.length - shown;

/** Show the next of them, below the others; `more` says whether there are more than were taken. */
export const showNext = (more) => {
  find('rows').append(...rows.slice(shown, shown + STEP).map(item));
  shown = Math.min(shown + STEP, rows.length);
  find('rows-summary').textContent = rows.length === 0 ? 'none' : `${count(shown)}${more || shown < rows.length ? ', and there are more' : ''}`;
};

/** Put messages that have just come above the others; the last ones go where there are too many. */
export const putRows = (found) => {
  const added = read(found.slice(-STEP)).reverse();
  find('rows').prepend(...added.map(item));
  rows.unshift(...added);
  rows.length = Math.min(rows.length, MOST);
  while (find('rows').childElementCount > STEP) find('rows').lastChild.remove();
  find('rows-summary').textContent = `${count(rows.length)} since ${clock(rows.at(-1).row.timestamp)}`;
  showValues(rows, 'newest');
};

onPayloadForm(() => find('rows').replaceChildren(...rows.slice(0, find('rows').childElementCount).map(item)));
