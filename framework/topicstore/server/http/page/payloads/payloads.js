/* Payloads as a person reads them, and the numbers in them. */

import { make } from '../elements.js';
import { count } from '../format.js';
import { isRaw } from './form.js';

const MOST_LEAVES = 60;
const MOST_TEXT = 2000;
const MOST_BYTES = 48;
const FEW_BYTES = 8;
/* The characters of a payload beside its topic. */
const PREVIEW = 48;

/* Integers that a number of JavaScript can't hold stay texts, as they are written. */
const exactly = (_, value, context) => (typeof value === 'number' && !Number.isSafeInteger(value) && Number.isInteger(value)
  ? context?.source ?? String(value) : value);

/** Return the JSON of a payload, undefined if it is something else. */
export const jsonOf = ({ payload }) => {
  if (payload === undefined || !/^\s*[[{\d-]/.test(payload)) return undefined;
  try {
    return JSON.parse(payload, exactly);
  } catch {
    return undefined;
  }
};

/** Return the number that a value is, also one that is written as a text; undefined if it is something else. */
export const numberOf = (value) => {
  if (typeof value === 'number') return value;
  return typeof value === 'string' && /^[-+]?\d+(\.\d+)?(e[-+]?\d+)?$/i.test(value) ? Number(value) : undefined;
};

/** Yield `[path, value]` for the values at the ends of some JSON. */
export function* leaves(value, path = '') {
  if (value === null || typeof value !== 'object' || Object.keys(value).length === 0) {
    yield [path, value];
  } else {
    for (const [name, inner] of Object.entries(value)) yield* leaves(inner, path ? `${path}.${name}` : name);
  }
}

const firstOf = (iterator, most) => {
  const found = [];
  for (const one of iterator) {
    if (found.length === most) return [found, true];
    found.push(one);
  }
  return [found, false];
};

const shortened = (text) => (text.length > MOST_TEXT ? `${text.slice(0, MOST_TEXT)}… (${count(text.length)} characters)` : text);
const written = (value) => (typeof value === 'string' ? value : JSON.stringify(value));

const bytes = (base64, most) => {
  const text = atob(base64);
  const hex = [...text.slice(0, most)].map((one) => one.charCodeAt(0).toString(16).padStart(2, '0')).join(' ');
  return `${count(text.length)} bytes: ${hex}${text.length > most ? ' …' : ''}`;
};

/** Return a payload in a few characters on one line. */
export const previewOf = (row) => {
  if (row.payload === undefined) return bytes(row.payload_base64 ?? '', FEW_BYTES);
  const line = row.payload.replace(/\s+/g, ' ').trim();
  return line.length > PREVIEW ? `${line.slice(0, PREVIEW)}…` : line || '(empty)';
};

/** Make the element that shows a payload: pretty, which is JSON by its fields, or raw. Bytes that are no text are in hexadecimal. */
export const shownPayload = (row, json) => {
  if (row.payload === undefined) return make('pre', { class: 'payload' }, bytes(row.payload_base64 ?? '', isRaw() ? MOST_TEXT : MOST_BYTES));
  if (isRaw() || json === null || typeof json !== 'object') return make('pre', { class: 'payload' }, shortened(row.payload));
  const [found, more] = firstOf(leaves(json), MOST_LEAVES);
  return make('dl', { class: 'unfolded' }, found.map(([path, value]) =>
    make('div', {}, make('dt', {}, path), make('dd', {}, shortened(written(value))))), more ? make('div', {}, '…') : null);
};
