/* Making elements. Children that are texts are inserted as text, so nothing in a message can become HTML. */

export const find = (id) => document.getElementById(id);

/** Make an element: attributes by name, listeners as `onclick` and so on; what is false or null is left out. */
export const make = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : String(child)));
  return made;
};

/** Replace what a table shows. A column is `[title, cell of a row, class]`; the first cell heads its row. */
export const fillTable = (table, columns, rows) => {
  const head = make('tr', {}, columns.map(([title, , kind]) => make('th', { scope: 'col', class: kind }, title)));
  const body = rows.map((row) => make('tr', {}, columns.map(([, cell, kind], at) =>
    at === 0 ? make('th', { scope: 'row', class: kind }, cell(row)) : make('td', { class: kind }, cell(row)))));
  table.replaceChildren(make('thead', {}, head), make('tbody', {}, body));
};

/** Replace what a list of large figures shows: `[title, value, unit, class, note]` each. */
export const fillFigures = (list, figures) => {
  list.replaceChildren(...figures.map(([title, value, unit, kind, note]) => make('div', { class: kind || null },
    make('dt', {}, title), make('dd', {}, value, unit ? make('small', {}, unit) : null), note ? make('dd', { class: 'note' }, note) : null)));
};

/** Replace what a list of facts shows: `[title, value]` each. */
export const fillFacts = (list, facts) => {
  list.replaceChildren(...facts.flatMap(([title, value]) => [make('dt', {}, title), make('dd', {}, value)]));
};

/** Ask before something that can't be taken back; whether the answer is yes. */
export const confirmed = (title, text, yes) => {
  const dialog = find('confirm');
  find('confirm-title').textContent = title;
  find('confirm-text').textContent = text;
  find('confirm-yes').textContent = yes;
  dialog.returnValue = 'no';
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener('close', () => resolve(dialog.returnValue === 'yes'), { once: true });
  });
};
