/* How figures and times are written. */

const whole = new Intl.NumberFormat('en');
const UNITS = ['bytes', 'kB', 'MB', 'GB', 'TB', 'PB'];

/** A whole number, with separators. */
export const count = (number) => whole.format(number);

/** A large number in few characters. */
export const short = (number) => (number < 1e5 ? count(Math.round(number))
  : new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 4 }).format(number));

/** A rate in few characters; a small one with its fraction. */
export const rate = (number) => (number > 0 && number < 10 ? number.toFixed(1) : short(number));

/** Bytes as `[number, unit]`. */
export const size = (bytes) => {
  const power = bytes < 1000 ? 0 : Math.min(Math.floor(Math.log10(bytes) / 3), UNITS.length - 1);
  const number = bytes / 1000 ** power;
  return [power === 0 || number >= 100 ? count(Math.round(number)) : number.toFixed(1), UNITS[power]];
};

/** Bytes as one text. */
export const sizeText = (bytes) => size(bytes).join(' ');

/** Microseconds since the epoch as a date and a time of this place, to the millisecond. */
export const moment = (microseconds) => {
  const date = new Date(microseconds / 1000);
  const two = (number, width = 2) => String(number).padStart(width, '0');
  return Number.isNaN(date.getTime()) ? `${microseconds} µs`
    : `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} `
      + `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}.${two(date.getMilliseconds(), 3)}`;
};

/** Such a time in few characters: the day and the minute, or the day and the year if that is not this one. */
export const stamp = (microseconds) => {
  const date = new Date(microseconds / 1000);
  const day = date.toLocaleDateString('en', { day: 'numeric', month: 'short' });
  return date.getFullYear() === new Date().getFullYear() ? `${day}, ${moment(microseconds).slice(11, 16)}` : `${day} ${date.getFullYear()}`;
};

/** Seconds as `[number, unit]`. */
export const duration = (seconds) => {
  if (seconds < 1) return [String(Math.round(seconds * 1000)), 'ms'];
  for (const [unit, length] of [['d', 86400], ['h', 3600], ['min', 60]]) {
    if (seconds >= 2 * length) return [(seconds / length).toFixed(seconds < 10 * length ? 1 : 0), unit];
  }
  return [seconds.toFixed(seconds < 10 ? 1 : 0), 's'];
};

/** Seconds as one text. */
export const durationText = (seconds) => duration(seconds).join(' ');
