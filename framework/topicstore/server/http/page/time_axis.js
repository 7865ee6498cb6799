/* The marks of an axis of time: as many as have room for their texts, at round times of the page's zone. */

const SECOND = 1000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const STEPS = [
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500],
  ...[1, 2, 5, 10, 15, 30].map((number) => number * SECOND),
  ...[1, 2, 5, 10, 15, 30].map((number) => number * MINUTE),
  ...[1, 2, 3, 6, 12].map((number) => number * HOUR),
  ...[1, 2, 7, 14].map((number) => number * DAY),
];
const MONTHS = [1, 2, 3, 6, 12, 24, 60, 120, 240, 600, 1200];
const MONTH = 30.4 * DAY;

const text = (at, options) => new Date(at).toLocaleString('en', { timeZone: 'UTC', ...options });
const dayOf = (at) => text(at, { day: 'numeric', month: 'short' });
const yearOf = (at) => text(at, { year: 'numeric' });

const everyStep = (from, until, step) => {
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= until; at += step) found.push(at);
  return found;
};

const everyMonths = (from, until, months) => {
  const begin = new Date(from);
  const found = [];
  const first = Math.floor((begin.getUTCFullYear() * 12 + begin.getUTCMonth()) / months) * months;
  for (let month = first, at = -Infinity; at <= until; month += months) {
    at = Date.UTC(Math.floor(month / 12), month % 12);
    if (at >= from && at <= until) found.push(at);
  }
  return found;
};

/* Returns the first line of a mark's text and the second one, which is written only where it changes. */
const linesOf = (step) => {
  if (step < SECOND) return [(at) => new Date(at).toISOString().slice(11, 23), dayOf];
  if (step < MINUTE) return [(at) => new Date(at).toISOString().slice(11, 19), dayOf];
  if (step < DAY) return [(at) => new Date(at).toISOString().slice(11, 16), dayOf];
  if (step < MONTH) return [dayOf, yearOf];
  return step < 12 * MONTH ? [(at) => text(at, { month: 'short' }), yearOf] : [yearOf, () => ''];
};

/* The pixels that a mark's text needs, with the room to the next one. */
const widthOf = (step) => (step < SECOND ? 112 : 80);

/** Return `[values, texts]` of the marks that have room in `width` pixels between two times of `wallOf`. */
export const timeTicks = (from, until, width) => {
  const fits = (step) => ((until - from) / step) * widthOf(step) <= width;
  const step = STEPS.find(fits);
  const months = step ? null : MONTHS.find((one) => fits(one * MONTH)) ?? MONTHS.at(-1);
  const values = step ? everyStep(from, until, step) : everyMonths(from, until, months);
  const [upper, lower] = linesOf(step ?? months * MONTH);
  let before = null;
  const texts = values.map((at) => {
    const below = lower(at);
    const changed = below !== before;
    before = below;
    return changed && below ? `${upper(at)}<br>${below}` : upper(at);
  });
  return [values, texts];
};
