/* The page's state in the hash of its address, such as `#replay?filter=home%2F%23&start=-2h`, so that it can be linked. */

/** Return `[view, values]` of the address. */
export const readAddress = () => {
  const [view, query = ''] = location.hash.slice(1).split('?', 2);
  return [view, Object.fromEntries(new URLSearchParams(query))];
};

/** Return the address of a view with values; those that are empty are left out. */
export const addressOf = (view, values = {}) => {
  const kept = Object.entries(values).filter(([, value]) => value !== '' && value !== null && value !== undefined);
  const query = new URLSearchParams(kept).toString();
  return `#${view}${query ? `?${query}` : ''}`;
};

/** Go to a view with values: the view opens as if the link had been followed. */
export const go = (view, values) => {
  location.hash = addressOf(view, values);
};
