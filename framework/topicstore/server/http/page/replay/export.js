/* Exports: everything that the replay finds, as a file. */

import { find, make } from '../elements.js';
import { request } from '../server.js';

const FORMATS = [
  ['JSON lines', 'application/x-ndjson', 'jsonl'],
  ['CSV', 'text/csv', 'csv'],
  ['Arrow', 'application/vnd.apache.arrow.stream', 'arrows'],
  ['Parquet', 'application/vnd.apache.parquet', 'parquet'],
];

const save = async (button, query, accept, ending, trouble) => {
  button.disabled = true;
  try {
    const body = await (await request('/messages', { query, accept })).blob();  // the browser keeps a large one on disk
    const link = make('a', { href: URL.createObjectURL(body), download: `messages.${ending}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  } catch (failed) {
    trouble(failed);
  }
  button.disabled = false;
};

/** Show the buttons that export what a query finds. */
export const showExports = (query, trouble) => {
  find('exports').replaceChildren(make('span', {}, 'Export all as'), ...FORMATS.map(([name, accept, ending]) =>
    make('button', { type: 'button', class: 'quiet', onclick: ({ target }) => save(target, query, accept, ending, trouble) }, name)));
};
