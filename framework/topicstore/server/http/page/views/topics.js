/* The view "Topics": which there are, level by level, with counts, and what the layout has learned of them. */

import { addressOf, go } from '../address.js';
import { fillTable, find } from '../elements.js';
import { count, counted, short } from '../format.js';
import { poll } from '../polling.js';
import { ask } from '../server.js';
import { chooseTopic, forgetTopics, refreshTopics, shownTopic } from '../topics/latest.js';
import { fillTree } from '../topics/tree.js';

const EVERY = 5;
const MOST = 200;
/* The items that a search opens. */
const OPEN = 40;
const LEARNED = 2000;
const SHOWN = 20;
const form = find('topic-search');

const nodeOf = (level, plus) => ({
  name: level.name,
  path: level.path,
  inner: level.below,
  plus: plus && !level.own,
  shown: shownTopic(level),
  ends: level.ends,
  note: level.topics === 1 ? short(level.messages) : `${short(level.messages)} in ${counted(level.topics, 'topic')}`,
  link: addressOf('replay', { filter: level.below ? `${level.path}/#` : level.path }),
});

const showTree = async ({ search, sort }, signal, trouble) => {
  const summary = find('topic-summary');
  summary.textContent = '';
  forgetTopics();
  await fillTree(find('tree'), async (node) => {
    const { items, next, plus } = await ask('/topics/tree', { prefix: node?.path, search, sort, limit: MOST }, { signal });
    if (!node) {
      summary.textContent = items.length === 0 ? 'none' : 'messages by level';
      find('no-topics').hidden = items.length > 0;
      find('no-topics-found').hidden = !search;
      find('no-topics-yet').hidden = Boolean(search);
    }
    return { nodes: items.map((level) => nodeOf(level, plus)), rest: next ? `There are more: search, or sort by messages. The first ${MOST} are shown.` : '' };
  }, trouble, { open: search ? OPEN : 0, choose: (node) => node.ends && chooseTopic(node.path, signal).catch(trouble) });
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
    ['Pattern', ({ path }) => path, 'topic'],
    ['Generations', ({ generations }) => [...generations].sort((a, b) => a - b).join(', ')],
    ['Shards', ({ shards }) => count(shards.size), 'number'],
  ], found.slice(0, SHOWN));
  find('learned-note').textContent = [
    found.length === 0 && 'None yet: no level has many values, or the layout learns no patterns.',
    found.length > SHOWN && `The first ${SHOWN} of ${count(found.length)} are shown.`,
    next && `Of the first ${count(LEARNED)} levels that were learned.`,
  ].filter(Boolean).join(' ');
};

/** Show the view until the signal ends it. */
export const topics = async (values, signal, trouble) => {
  for (const field of form.elements) if (field.name) field.value = values[field.name] ?? field.dataset.default ?? '';
  const { search, sort } = Object.fromEntries(new FormData(form));
  await Promise.all([showTree({ search: search.trim(), sort }, signal, trouble), showLearned(signal)]);
  await poll(EVERY, () => refreshTopics(signal), signal, trouble);
};

form.addEventListener('submit', (event) => {
  event.preventDefault();
  go('topics', Object.fromEntries(new FormData(form)));
});
