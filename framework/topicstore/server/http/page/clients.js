/* What to type in a terminal: the first message, the first subscription. */

import { ask } from './server.js';

/* An address that stands for all of the machine's is that under which the page was found. */
const EVERYWHERE = /^(0\.0\.0\.0|\[::\])$/;

/** Return a function of a command and its arguments that makes a line for a terminal; without a plain listener it returns null. */
export const terminal = async (signal) => {
  const { items } = await ask('/listeners', {}, { signal });
  const [plain] = items.filter(({ scheme }) => scheme === 'mqtt').flatMap(({ addresses }) => addresses);
  if (!plain) return () => null;
  const at = plain.lastIndexOf(':');
  const host = EVERYWHERE.test(plain.slice(0, at)) ? location.hostname : plain.slice(0, at);
  return (command, text) => `${command} -h ${host.replace(/[[\]]/g, '')} -p ${plain.slice(at + 1)} ${text}`;
};
