/* A tree whose branches are asked for when they are opened, by mouse or keyboard (the tree pattern of WAI-ARIA). */

import { make } from '../elements.js';

const items = (tree) => [...tree.querySelectorAll('[role="treeitem"]')].filter((item) => item.checkVisibility());

const focus = (tree, item) => {
  if (!item) return;
  tree.querySelectorAll('[tabindex="0"]').forEach((other) => { other.tabIndex = -1; });
  item.tabIndex = 0;
  item.focus();
};

const close = (item) => item.setAttribute('aria-expanded', 'false');

/* Makes an item of a branch or a leaf. */
const itemOf = (node, branches) => {
  const item = make('li', { role: 'treeitem', tabindex: '-1', 'aria-expanded': node.inner ? 'false' : null, 'aria-label': `${node.name || 'an empty level'}, ${node.note}` },
    make('div', {},
      make('span', { class: 'mark', 'aria-hidden': 'true' }),
      make('span', { class: node.plus ? 'topic has-plus' : 'topic' }, node.name || '(empty)', node.plus ? make('span', { class: 'plus', title: 'Stored together with its neighbours' }, '+') : null),
      node.shown,
      make('span', { class: 'count' }, node.note),
      make('a', { class: 'look', href: node.link, tabindex: '-1', 'aria-hidden': 'true' }, 'Replay')));
  item.node = node;
  item.open = async () => {
    if (!node.inner || item.getAttribute('aria-expanded') === 'true') return;
    item.setAttribute('aria-expanded', 'true');
    if (!item.querySelector('[role="group"]')) item.append(make('ul', { role: 'group' }, await rowsOf(node, branches)));
  };
  return item;
};

const rowsOf = async (node, branches) => {
  const { nodes, rest } = await branches(node);
  return [...nodes.map((inner) => itemOf(inner, branches)), rest ? make('li', { class: 'note' }, rest) : null].filter(Boolean);
};

const keys = (tree, item, trouble, choose) => {
  const all = items(tree);
  const at = all.indexOf(item);
  const open = item.getAttribute('aria-expanded') === 'true';
  return {
    ArrowDown: () => focus(tree, all[at + 1]),
    ArrowUp: () => focus(tree, all[at - 1]),
    Home: () => focus(tree, all[0]),
    End: () => focus(tree, all.at(-1)),
    ArrowRight: () => (open ? focus(tree, item.querySelector('[role="treeitem"]')) : item.open().catch(trouble)),
    ArrowLeft: () => (open ? close(item) : focus(tree, item.parentElement.closest('[role="treeitem"]'))),
    Enter: () => { location.hash = item.node.link; },
    ' ': () => choose(item.node),
  };
};

/* Opens branches, the first ones down to their topics, until as many items as wanted are shown or all are open. */
const openBranches = async (tree, most) => {
  while (items(tree).length < most) {
    const closed = items(tree).find((item) => item.getAttribute('aria-expanded') === 'false');
    if (!closed) return;
    await closed.open();
  }
};

/** Fill a tree. `branches(node)` resolves to `{nodes, rest}` below a node, null for the first ones: each has a `name`, a
 * `note`, a `link`, an element `shown` beside its name, whether it has `inner` ones, and whether it is learned as `plus`.
 * Branches are opened until `open` items are shown. `choose(node)` is called for the one that is clicked. */
export const fillTree = async (tree, branches, trouble, { open = 0, choose = () => {} } = {}) => {
  const rows = await rowsOf(null, branches);
  tree.replaceChildren(...rows);
  await openBranches(tree, open);
  const first = tree.querySelector('[role="treeitem"]');
  if (first) first.tabIndex = 0;
  tree.onclick = ({ target }) => {
    const item = target.closest('[role="treeitem"]');
    if (!item || target.closest('a')) return;
    focus(tree, item);
    choose(item.node);
    if (item.getAttribute('aria-expanded') === 'true') close(item);
    else item.open().catch(trouble);
  };
  tree.onkeydown = (event) => {
    const act = keys(tree, event.target.closest('[role="treeitem"]') ?? first, trouble, choose)[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
};
