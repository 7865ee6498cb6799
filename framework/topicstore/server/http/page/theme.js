/* Light or dark: what the system prefers, until the switch says otherwise in this browser. */

import { find } from './elements.js';

const KEPT = 'topicstore-theme';
const system = matchMedia('(prefers-color-scheme: dark)');

export const isDark = () => (document.documentElement.dataset.theme || (system.matches ? 'dark' : 'light')) === 'dark';

const listeners = new Set();

/** Call a function whenever the colours have changed. */
export const onTheme = (listener) => listeners.add(listener);

const show = () => {
  find('theme').textContent = isDark() ? 'Light' : 'Dark';
  find('theme').setAttribute('aria-label', `Use ${isDark() ? 'light' : 'dark'} colours`);
  listeners.forEach((listener) => listener());
};

/** Return what a colour of the style sheet, such as `--ink`, is now. */
export const colour = (name) => {
  const probe = find('theme').appendChild(document.createElement('i'));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

export const startTheme = () => {
  const kept = localStorage.getItem(KEPT);
  if (kept) document.documentElement.dataset.theme = kept;
  system.addEventListener('change', show);
  find('theme').addEventListener('click', () => {
    document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
    localStorage.setItem(KEPT, document.documentElement.dataset.theme);
    show();
  });
  show();
};
