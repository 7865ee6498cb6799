/* The view "Topics": which there are, level by level, with counts, and what the layout has learned of them. */

import { addressOf, go } from '../address.js';
import { fillTable, find } from '../elements.js';
import { count, short } from '../format.js';
import { ask } from '../server.js';
import { fillTree } from '../topics/tree.js';

const MOST = 200;
const LEARNED = 2000;
const SHOWN = 40;
const form = find('topic-search');

const nodeOf = (level, plus) => ({
  name: level.name,
  path: level.path,
  inner: level.below,
  plus: plus && !level.own,
  note: level.topics === 1 ? short(level.messages) : `${short(level.messages)} in ${count(level.topics)} topics`,
  link: addressOf('replay', { filter: level.below ? `${level.path}/#` : level.path }),
});

const showTree = async ({ search, sort }, signal, trouble) => {
  const summary = find('topic-summary');
  summary.textContent = '';
  await fillTree(find('tree'), async (node) => {
    const { items, next, plus } = await ask('/topics/tree', { prefix: node?.path, search, sort, limit: MOST }, { signal });
    if (!node) summary.textContent = items.length === 0 ? 'none' : 'messages by level';
    return { nodes: items.map((level) => nodeOf(level, plus)), rest: next ? `There are more: search, or sort by messages. The first ${MOST} are shown.` : '' };
  }, trouble);
};

/* Nodes with wildcards, the broadest first, each path once though many shards and generations have learned it. */
const wildcards = (items) => {
  const found = new Map();
  for (const { path, shard, generation, stream } of items) {
    if (!/(^|\/)[+#]/.test(path) || stream === null) continue;
    const known = found.get(path) ?? { path, shards: new Set(), generations: new Set() };
    known.shards.add(shard);
    known.generations.add(generation);
    found.set(path, known);
  }
  const breadth = ({ path }) => path.split('/').filter((level) => level === '+' || level === '#').length;
  return [...found.values()].sort((a, b) => breadth(b) - breadth(a) || a.path.localeCompare(b.path));
};

const showLearned = async (signal) => {
  const { items, next } = await ask('/learned-topics', { limit: LEARNED }, { signal });
  const found = wildcards(items);
  fillTable(find('learned'), [
    ['Learned', ({ path }) => path, 'topic'],
    ['Generations', ({ generations }) => [...generations].sort((a, b) => a - b).join(', ')],
    ['Shards', ({ shards }) => count(shards.size), 'number'],
  ], found.slice(0, SHOWN));
  find('learned-note').textContent = [
    found.length === 0 && 'Nothing yet: every level has few values, or the layout learns nothing.',
    found.length > SHOWN && `The first ${SHOWN} of ${count(found.length)} are shown.`,
    next && `Of the first ${count(LEARNED)} nodes that were learned.`,
  ].filter(Boolean).join(' ');
};

/** Show the view until the signal ends it. */
export const topics = async (values, signal, trouble) => {
  for (const field of form.elements) if (field.name) field.value = values[field.name] ?? field.dataset.default ?? '';
  const { search, sort } = Object.fromEntries(new FormData(form));
  await Promise.all([showTree({ search: search.trim(), sort }, signal, trouble), showLearned(signal)]);
};

form.addEventListener('submit', (event) => {
  event.preventDefault();
  go('topics', Object.fromEntries(new FormData(form)));
});
