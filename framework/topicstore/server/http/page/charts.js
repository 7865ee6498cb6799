/* Charts, by the library that the server has from its package. It is loaded when the first chart is shown; without it
 * the page works with its tables, and a sentence stands where a chart would be. */

import { make } from './elements.js';
import { colour, onTheme } from './theme.js';
import { instantOf, wallOf } from './time.js';
import { timeTicks } from './time_axis.js';

const shown = new Map();
let loading = null;

/* While it loads, the library wants to add a sheet for maps, which are not shown here, as an inline style, which the
 * page's policy forbids. */
const withoutInlineStyles = (script) => {
  const { head } = document;
  head.appendChild = (one) => (one instanceof HTMLStyleElement ? one : Node.prototype.appendChild.call(head, one));
  script.addEventListener('load', () => { delete head.appendChild; });
  script.addEventListener('error', () => { delete head.appendChild; });
};

const load = async () => {
  const { library, missing } = await (await fetch('charts')).json();
  if (!library) throw new Error(missing);
  await new Promise((resolve, reject) => {
    const script = make('script', {
      src: library,
      onload: resolve,
      onerror: () => reject(new Error('The library for charts could not be loaded.')),
    });
    withoutInlineStyles(script);
    document.head.append(script);
  });
  return window.Plotly;
};

/* A chart of nothing has a scale too. */
const SMALL = 10;
const scale = (series, { fromZero }) => (fromZero && !series.some(({ y }) => y.some((value) => value >= SMALL))
  ? { range: [0, SMALL] } : { rangemode: fromZero ? 'tozero' : 'normal' });

const MARGIN = { t: 8, r: 16, b: 40, l: 44 };

const timesOf = (series) => series.flatMap(({ x }) => (x.length ? [Math.min(...x), Math.max(...x)] : []));

/* The range of the time axis: the requested one, otherwise that of the series; never empty. */
const rangeOf = (series, { range }) => {
  const times = timesOf(series);
  const [from, until] = range ?? (times.length ? [Math.min(...times), Math.max(...times)] : [Date.now() - 1000, Date.now()]);
  const room = range ? 0 : Math.max((until - from) * 0.02, 500);
  return [wallOf(from - room), wallOf(Math.max(until + room, from + 1))];
};

const timeAxis = (place, range) => {
  const [tickvals, ticktext] = timeTicks(...range, place.clientWidth - MARGIN.l - MARGIN.r);
  return { type: 'date', showgrid: false, range, tickmode: 'array', tickvals, ticktext, hoverformat: '%-d %b %Y, %H:%M:%S' };
};

/* Exponents are texts: as raised figures they would need inline styles. */
const layout = (place, series, options) => {
  const [ink, line, soft] = ['--ink', '--line', '--soft'].map(colour);
  const axis = {
    color: soft, gridcolor: line, linecolor: line, zeroline: false, fixedrange: true, automargin: true,
    tickangle: 0, ticklabeloverflow: 'hide past div',
  };
  return {
    autosize: true,
    bargap: 0.08,
    dragmode: options.onrange ? 'select' : false,
    selectdirection: 'h',
    font: { family: getComputedStyle(place).fontFamily, size: 12, color: ink },
    hovermode: 'x unified',
    hoverlabel: { bgcolor: colour('--panel'), bordercolor: colour('--control'), font: { color: ink, size: 12 } },
    margin: MARGIN,
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    showlegend: false,
    xaxis: { ...axis, ...timeAxis(place, rangeOf(series, options)) },
    yaxis: { ...axis, ...scale(series, options), exponentformat: options.fromZero ? 'SI' : 'e', nticks: 5, showline: false },
  };
};

/* The library reads a few tags in names; a topic is text. */
const asText = (name) => name.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');

const trace = ({ name, x, y, colour: kind, bars, dots, widths }) => ({
  name: asText(name),
  x: x.map(wallOf),
  y,
  width: widths,
  type: bars ? 'bar' : 'scatter',
  mode: dots ? 'lines+markers' : 'lines',
  line: { color: colour(kind), width: 1.75 },
  marker: { color: colour(kind), size: 4 },
  hovertemplate: '%{y:,.4~g}',
});

const draw = (library, place) => {
  const { series, options } = shown.get(place);
  return library.react(place, series.map(trace), layout(place, series, options), { displayModeBar: false, responsive: true });
};

/** Draw series over time in `place`: each with a `name`, times `x` (milliseconds), values `y` and a `colour` of the style
 * sheet; `bars` instead of a line, `dots` on it. Options: `fromZero`, `range` of the times, `onrange(from, until)` for what is marked with the mouse. */
export const chart = async (place, series, options = {}) => {
  const first = !shown.has(place);
  shown.set(place, { series, options });
  try {
    loading ??= load();
    const library = await loading;
    if (first) place.replaceChildren();
    await draw(library, place);
    if (first) {
      place.on('plotly_selected', (marked) => {
        const { onrange } = shown.get(place).options;
        if (marked?.range && onrange) onrange(...marked.range.x.map((text) => instantOf(Date.parse(`${text.slice(0, 23).replace(' ', 'T')}Z`))));
      });
    }
  } catch (failed) {
    place.replaceChildren(make('p', { class: 'note' }, failed.message));
  }
};

const redraw = async () => {
  if (!loading) return;
  const library = await loading.catch(() => null);
  if (library) shown.forEach((_, place) => place.checkVisibility() && draw(library, place));
};

onTheme(redraw);
addEventListener('resize', redraw);
