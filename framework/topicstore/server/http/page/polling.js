/* Asking again and again, one request at a time, and not at all while nobody looks. */

const pause = (seconds, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, seconds * 1000);
  signal.addEventListener('abort', () => { clearTimeout(timer); resolve(); }, { once: true });
});

const seen = (signal) => new Promise((resolve) => {
  if (!document.hidden) return resolve();
  document.addEventListener('visibilitychange', resolve, { once: true });
  signal.addEventListener('abort', resolve, { once: true });
  return undefined;
});

/** Call `look` every few seconds until the signal ends it. What fails is handed to `trouble`, null when all is well. */
export const poll = async (seconds, look, signal, trouble) => {
  while (!signal.aborted) {
    try {
      await look();
      if (!signal.aborted) trouble(null);
    } catch (failed) {
      if (!signal.aborted) trouble(failed);
    }
    await pause(seconds, signal);
    await seen(signal);
  }
};
