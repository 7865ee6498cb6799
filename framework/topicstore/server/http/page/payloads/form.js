/* Whether payloads are shown pretty, which is JSON by its fields, or raw, as their bytes were sent. One choice for all views. */

const KEPT = 'topicstore-payloads';
const forms = () => [...document.querySelectorAll('.payload-form')];
const listeners = new Set();

/** Whether payloads are shown as they were sent. */
export const isRaw = () => localStorage.getItem(KEPT) === 'raw';

/** Call a function whenever the other form was chosen. */
export const onPayloadForm = (listener) => listeners.add(listener);

const show = () => forms().forEach((form) => { form.value = isRaw() ? 'raw' : 'pretty'; });

export const startPayloadForms = () => {
  for (const form of forms()) {
    form.addEventListener('change', () => {
      localStorage.setItem(KEPT, form.value);
      show();
      listeners.forEach((listener) => listener());
    });
  }
  show();
};
