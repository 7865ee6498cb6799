/* The one time zone in which the page shows times and reads those that are typed: the one of this place, or UTC. */

import { find } from './elements.js';

const KEPT = 'topicstore-zone';
const LOCAL = Intl.DateTimeFormat().resolvedOptions().timeZone || 'local time';
const MINUTE = 60_000;
/* A date, perhaps with a time, without a zone of its own. */
const TYPED = /^(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?)?$/;
/* As many digits as microseconds since the epoch have from 2001 on. */
const MICROSECONDS = /^\d{15,17}$/;

const isUtc = () => find('zone').value === 'utc';
const two = (number, width = 2) => String(number).padStart(width, '0');

/** The name of the zone, as in "Europe/Berlin". */
export const zoneName = () => (isUtc() ? 'UTC' : LOCAL);

/** Milliseconds since the epoch as those at which a clock of UTC shows what a clock of the zone shows then. */
export const wallOf = (milliseconds) => (isUtc() ? milliseconds : milliseconds - new Date(milliseconds).getTimezoneOffset() * MINUTE);

/** The reverse of `wallOf`. Where clocks are set back, the earlier of two times. */
export const instantOf = (wall) => {
  if (isUtc()) return wall;
  const at = new Date(wall);
  return new Date(at.getUTCFullYear(), at.getUTCMonth(), at.getUTCDate(), at.getUTCHours(), at.getUTCMinutes(), at.getUTCSeconds(), at.getUTCMilliseconds()).getTime();
};

const wallDate = (microseconds) => new Date(wallOf(Math.floor(microseconds / 1000)));

const written = (date) => `${date.getUTCFullYear()}-${two(date.getUTCMonth() + 1)}-${two(date.getUTCDate())} `
  + `${two(date.getUTCHours())}:${two(date.getUTCMinutes())}:${two(date.getUTCSeconds())}`;

/** Microseconds since the epoch as a date and a time, to the millisecond. */
export const moment = (microseconds) => {
  const date = wallDate(microseconds);
  return Number.isNaN(date.getTime()) ? `${microseconds} µs` : `${written(date)}.${two(date.getUTCMilliseconds(), 3)}`;
};

/** Such a time of the day, to the second. */
export const clock = (microseconds) => moment(microseconds).slice(11, 19);

/** Such a time in few characters: the day and the minute, or the day and the year if that is not this one. */
export const stamp = (microseconds) => {
  const date = wallDate(microseconds);
  const day = date.toLocaleDateString('en', { day: 'numeric', month: 'short', timeZone: 'UTC' });
  const here = new Date(wallOf(Date.now())).getUTCFullYear();
  return date.getUTCFullYear() === here ? `${day}, ${moment(microseconds).slice(11, 16)}` : `${day} ${date.getUTCFullYear()}`;
};

/** Two such times, of which the second one has no date if it is of the same day. */
export const span = (from, until) => {
  const [begin, end] = [from, until].map((one) => moment(one).slice(0, 19));
  return `${begin} to ${begin.slice(0, 10) === end.slice(0, 10) ? end.slice(11) : end}`;
};

/** A sentence of the server with its times, which it writes in UTC, as those of the zone. */
export const inZone = (text) => text.replace(/\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ/g, (time) => written(wallDate(Date.parse(time) * 1000)));

/** Convert a typed time to the form of a request; a time without a zone is read in the zone of the page. */
export const typedTime = (text) => {
  const found = TYPED.exec(text.trim());
  if (!found) return text.trim();
  const [year, month, day, hour, minute, second] = found.slice(1, 7).map((part) => Number(part ?? 0));
  const wall = new Date(Date.UTC(year, month - 1, day, hour, minute, second));
  if (!written(wall).startsWith(`${found[1]}-${found[2]}-${found[3]}`)) return text.trim();  // as the 31st of February
  return String(instantOf(wall.getTime()) * 1000 + Number((found[7] ?? '').padEnd(6, '0')));
};

/** The reverse of `typedTime`: a time in the address as it is shown in a field. */
export const shownTime = (text = '') => {
  if (!MICROSECONDS.test(text)) return text;
  const rest = Number(text) % 1e6;
  return written(wallDate(Number(text))) + (rest ? `.${two(rest, 6).replace(/0+$/, '')}` : '');
};

/** Begin with the zone that was chosen in this browser before; call `changed` when another one is chosen. */
export const startZone = (changed) => {
  find('zone').querySelector('[value="local"]').textContent = LOCAL === 'UTC' ? 'Local (UTC)' : LOCAL.split('/').at(-1).replaceAll('_', ' ');
  find('zone').title = `All times are in one zone: ${LOCAL} or UTC`;
  find('zone').value = localStorage.getItem(KEPT) === 'utc' ? 'utc' : 'local';
  find('zone').addEventListener('change', () => {
    localStorage.setItem(KEPT, find('zone').value);
    changed();
  });
};
