/* The beginning: which view is shown, by the address, and going between them. */

import { addressOf, readAddress } from './address.js';
import { find } from './elements.js';
import { startPayloadForms } from './payloads/form.js';
import { startTheme } from './theme.js';
import { startZone } from './time.js';
import { now } from './views/now.js';
import { publish } from './views/publish.js';
import { replay } from './views/replay.js';
import { retained } from './views/retained.js';
import { sessions } from './views/sessions.js';
import { storage } from './views/storage.js';
import { topics } from './views/topics.js';

/* Each view is a function of the values in the address, and of a signal that ends what it has begun. */
const VIEWS = { now, topics, replay, sessions, retained, storage, publish };
const tabs = [...document.querySelectorAll('[role="tab"]')];
/* The views' elements have other ids than the address names, or a browser would scroll to them and begin with Tab there. */
const nameOf = (tab) => tab.id.slice('tab-'.length);
const left = {};
let ending = null;

/** Say what went wrong, until something else is shown. */
const trouble = (failed) => {
  if (failed?.name === 'AbortError') return;
  const text = failed?.message || '';
  if (find('trouble').textContent !== text) find('trouble').textContent = text;
  find('trouble').hidden = !text;
};

const show = () => {
  const [wanted, values] = readAddress();
  const name = wanted in VIEWS ? wanted : 'now';
  ending?.abort();
  ending = new AbortController();
  left[name] = location.hash;
  for (const tab of tabs) {
    const chosen = nameOf(tab) === name;
    tab.setAttribute('aria-selected', chosen);
    tab.tabIndex = chosen ? 0 : -1;
    find(tab.getAttribute('aria-controls')).hidden = !chosen;
    if (chosen) document.title = `${tab.textContent} · topicstore`;
  }
  trouble(null);
  VIEWS[name](values, ending.signal, trouble).catch(trouble);
};

const open = (tab) => {
  const name = nameOf(tab);
  location.hash = left[name] || addressOf(name);
  tab.focus();
};

for (const [at, tab] of tabs.entries()) {
  tab.addEventListener('click', () => open(tab));
  tab.addEventListener('keydown', ({ key }) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[key];
    if (to !== undefined) open(tabs[to % tabs.length]);
  });
}

document.querySelector('.skip').addEventListener('click', (event) => {
  event.preventDefault();  // the hash names the view
  find('main').focus();
});

startTheme();
startZone(show);
startPayloadForms();
addEventListener('hashchange', show);
show();
