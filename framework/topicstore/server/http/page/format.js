/* How figures are written. */

const whole = new Intl.NumberFormat('en');
const UNITS = ['bytes', 'kB', 'MB', 'GB', 'TB', 'PB'];

/** A whole number, with separators. */
export const count = (number) => whole.format(number);

/** A number of things, with their name in the singular or plural. */
export const counted = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

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

/** How long ago something was, in seconds, in words. */
export const agoText = (seconds) => (seconds < 1 ? 'just now' : `${durationText(seconds)} ago`);
