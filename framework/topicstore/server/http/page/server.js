/* Asking the server. A token is asked for once, when the server wants one, and kept until the tab is closed. */

import { find } from './elements.js';

const BASE = new URL('api/v5', document.baseURI).href;
const KEPT = 'topicstore-token';

/** An answer that is not what was asked for. `message` is the sentence with which the server says why. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

let asked = null;

const askForToken = () => {
  const dialog = find('token');
  const input = dialog.querySelector('input');
  asked ??= new Promise((resolve) => {
    if (sessionStorage.getItem(KEPT)) find('token-reason').textContent = 'The server does not know this token.';
    input.value = '';
    dialog.showModal();
    dialog.addEventListener('close', () => {
      asked = null;
      if (dialog.returnValue === 'use' && input.value) sessionStorage.setItem(KEPT, input.value.trim());
      resolve(dialog.returnValue === 'use');
      dialog.returnValue = '';
    }, { once: true });
  });
  return asked;
};

const headers = (more) => {
  const token = sessionStorage.getItem(KEPT);
  return token ? { Authorization: `Bearer ${token}`, ...more } : more;
};

const problem = async (response) => {
  const text = await response.text();
  try {
    return new Problem(response.status, JSON.parse(text).detail || response.statusText);
  } catch {
    return new Problem(response.status, `${response.status} ${response.statusText}`);
  }
};

/** The address of a path below the interface for programs. What is empty in `query` is left out, lists are repeated. */
export const address = (path, query = {}) => {
  const url = new URL(BASE + path);
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== '') url.searchParams.append(name, one);
  }
  return url;
};

/** Return the response to a request, whose body is `json` if that is there. Throws `Problem`, also where the server can't be reached. */
export const request = async (path, { query, method = 'GET', accept = 'application/json', signal, more = {}, json } = {}) => {
  const before = sessionStorage.getItem(KEPT);
  let response;
  try {
    response = await fetch(address(path, query), {
      method,
      signal,
      headers: headers({ Accept: accept, ...(json === undefined ? {} : { 'Content-Type': 'application/json' }), ...more }),
      body: json === undefined ? undefined : JSON.stringify(json),
    });
  } catch (failed) {
    if (failed.name === 'AbortError') throw failed;
    throw new Problem(0, 'The server does not answer.');
  }
  if (response.status === 401 && (before !== sessionStorage.getItem(KEPT) || await askForToken())) {
    return request(path, { query, method, accept, signal, more, json });
  }
  if (!response.ok) throw await problem(response);
  return response;
};

/** Return the document that answers a request. */
export const ask = async (path, query, options = {}) => (await request(path, { query, ...options })).json();

/** Yield the parts of a streamed text that a separator ends, and the rest. */
export async function* parts(response, separator) {
  let rest = '';
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const found = (rest + read.value).split(separator);
    rest = found.pop();
    yield* found;
  }
  if (rest) yield rest;
}

const SCOPES = ['read', 'write', 'admin'];

/** Return a function that says whether the token, or the absence of one, has a scope: `may('write')`. */
export const rights = async (signal) => {
  const { scope } = await ask('/scope', {}, { signal });
  return (wanted) => SCOPES.indexOf(scope) >= SCOPES.indexOf(wanted);
};
