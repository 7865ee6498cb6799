/* What a person would stumble over, found by measuring: lists of texts, empty where all is well. */

const shown = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility());

/* Whether something around hides what sticks out of it; what scrolls hides nothing. */
const hidden = ({ left, right }, from) => {
  for (let at = from; at && !at.matches('.scrolls, pre'); at = at.parentElement) {
    const around = at.getBoundingClientRect();
    const hides = at === document.body || getComputedStyle(at).overflowX !== 'visible';
    if (hides && (left < around.left - 0.5 || right > around.right + 0.5)) return true;
  }
  return false;
};

const clippedText = (node) => {
  const parent = node.parentElement;
  if (!node.data.trim() || !parent.checkVisibility() || parent.closest('script, svg, option')) return false;
  const range = document.createRange();
  range.selectNodeContents(node);
  return hidden(range.getBoundingClientRect(), parent);
};

const clippedLabel = (text) => {
  const [box, around] = [text.getBoundingClientRect(), text.closest('svg').getBoundingClientRect()];
  return hidden(box, text.closest('.plot *:not(svg, svg *)')) || box.left < around.left - 0.5 || box.right > around.right + 0.5
    || box.bottom > around.bottom + 0.5 || box.top < around.top - 2 || text.textContent.includes('…');
};

const cut = () => {
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) if (clippedText(texts.currentNode)) found.push(texts.currentNode.data);
  return [...found, ...shown('svg text').filter(clippedLabel).map((one) => one.textContent)];
};

const overlap = (a, b) =>
  Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;

const overlapping = () => shown('.plot svg').flatMap((svg) => {
  const texts = [...svg.querySelectorAll('text')]
    .filter((one) => one.textContent && one.checkVisibility({ opacityProperty: true }))
    .map((one) => [one.textContent, one.getBoundingClientRect()]);
  return texts.flatMap(([name, box], at) => texts.slice(at + 1)
    .filter(([, other]) => overlap(box, other)).map(([other]) => `${name} / ${other}`));
});

/* Texts outside plots of which one is drawn over another; what stays in place while the rest scrolls may be. */
const colliding = () => {
  const lines = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const { currentNode: node } = texts;
    if (!node.data.trim() || !node.parentElement.checkVisibility() || node.parentElement.closest('script, svg, option, header, .skip')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) lines.push([node.data.trim().slice(0, 40), box]);
  }
  lines.sort(([, a], [, b]) => a.top - b.top);
  return lines.flatMap(([name, box], at) => {
    const found = [];
    for (let next = at + 1; next < lines.length && lines[next][1].top < box.bottom; next += 1) {
      if (overlap(box, lines[next][1])) found.push(`${name} / ${lines[next][0]}`);
    }
    return found;
  });
};

const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const channels = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};

/* Relative luminance and contrast as WCAG 2.2 has them. */
const luminance = (colour) => {
  const [r, g, b] = colour.slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (one, other) => {
  const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
};
const behind = (one) => {
  for (let at = one; at; at = at.parentElement) {
    const colour = channels(getComputedStyle(at).backgroundColor);
    if (colour[3] === 255) return colour;
  }
  return [255, 255, 255, 255];
};
const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());

const faintTexts = (least) => {
  const pages = shown('body *:not(svg, svg *, script, style, option)').filter(hasText)
    .map((one) => [one.textContent, getComputedStyle(one).color, behind(one)]);
  const plots = shown('svg text').map((one) => [one.textContent, getComputedStyle(one).fill, behind(one.closest('.plot'))]);
  return [...pages, ...plots].filter(([, colour, ground]) => contrast(channels(colour), ground) < least)
    .map(([text, colour]) => `${text.trim().slice(0, 40)}: ${colour}`);
};

const faintMarks = (least) => shown('svg .mark-symbol path')
  .map((one) => [getComputedStyle(one).stroke, behind(one.closest('.plot'))])
  .filter(([colour, ground]) => contrast(channels(colour), ground) < least).map(([colour]) => colour);

window.measures = { colliding, cut, faintMarks, faintTexts, overlapping };
