const read = (id) => JSON.parse(document.getElementById(id).textContent);
const find = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const element = (tag, text = "", attributes = {}) => {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

/* Light and dark: as the system has it, until somebody chooses. */
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = document.getElementById("theme");
const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.hidden = false;
theme.addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
dark.addEventListener("change", nameTheme);
nameTheme();

/* Plots are drawn when they are about to be seen, or printed. Where there is little room, names and figures
   stand above their row instead of beside it, and no lines of limits cross them. */
const config = read("plot-config");
const NARROW = 480;
const NARROW_ROW = 40;
const LABEL_ABOVE = { labelPadding: 0, labelOffset: -14, labelBaseline: "middle", labelLimit: 210 };
const narrowed = (specification, rows) => {
  specification.height = rows * NARROW_ROW;
  specification.layer = specification.layer.filter(({ encoding }) => encoding.y);
  for (const { encoding } of specification.layer)
    if (encoding.y.axis) Object.assign(encoding.y.axis, LABEL_ABOVE, { labelAlign: encoding.y.axis.orient });
  return specification;
};
const draw = async (plot) => {
  if (plot.dataset.drawn) return;
  plot.dataset.drawn = "begun";
  const specification = JSON.parse(find("script", plot).textContent);
  const isNarrow = plot.clientWidth < NARROW;
  const inside = find("div", plot) ?? plot.appendChild(element("div"));
  const shown = isNarrow ? narrowed(specification, Number(plot.dataset.rows)) : specification;
  const view = await window.vegaEmbed(inside, shown, {
    actions: false, renderer: "svg", config, defaultStyle: false, tooltip: { disableDefaultStyle: true },
  });
  plot.dataset.drawn = isNarrow ? "narrow" : "wide";
  plot.finalizeView = () => view.finalize();
};
const watcher = new IntersectionObserver((seen) => {
  for (const { isIntersecting, target } of seen) if (isIntersecting) draw(target);
}, { rootMargin: "800px" });
const watch = (plot) => { watcher.unobserve(plot); watcher.observe(plot); };
const plots = all(".plot");
plots.forEach(watch);
addEventListener("beforeprint", () => plots.filter((plot) => plot.offsetParent).forEach(draw));
addEventListener("resize", () => {
  for (const plot of plots.filter((one) => one.finalizeView && one.offsetParent)) {
    if ((plot.clientWidth < NARROW) === (plot.dataset.drawn === "narrow")) continue;
    plot.finalizeView();
    delete plot.finalizeView;
    delete plot.dataset.drawn;
    watch(plot);
  }
});

/* All values: [workload, durability, contender, phase, metric, {group: value}], each but the last an index of a name. */
const { names, kinds, units, questions, baseline, cells } = read("run-figures");
const COLUMNS = ["workload", "durability", "contender", "phase", "metric"];
const median = (values) => {
  const sorted = values.toSorted((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
};
const figures = cells.map((cell) => {
  const by = cell[5];
  const values = Object.values(by);
  const named = Object.fromEntries(COLUMNS.map((column, at) => [column, names[column][cell[at]]]));
  return {
    ...named, by, kind: kinds[cell[2]], unit: units[cell[4]], order: cell[3],
    median: median(values), low: Math.min(...values), high: Math.max(...values), repetitions: values.length,
  };
});
const keyed = (...parts) => parts.join("\u0000");
const index = new Map(figures.map((one) => [keyed(...COLUMNS.map((column) => one[column])), one]));

const number = (value) => {
  for (const [size, prefix] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]])
    if (value >= size) return (value / size).toPrecision(3) + prefix;
  return value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString();
};
const isTime = (unit) => unit === "ms" || unit === "s";
const figure = (value, unit) => (isTime(unit) && value >= 1e3 ? Math.round(value).toLocaleString("en") : number(value));
const times = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(value >= 1.1 ? 1 : 2));

const fill = (select, options, chosen) => {
  select.replaceChildren(...options.map(([value, text]) => element("option", text ?? value, { value })));
  if (chosen !== undefined) select.value = chosen;
};

/* The durability of the plots. */
document.getElementById("durability")?.addEventListener("change", ({ target }) => {
  for (const part of all(".of-durability")) part.hidden = part.dataset.durability !== target.value;
});

/* Ratios to a baseline, within groups. */
const ratioForm = document.getElementById("ratio-choices");
fill(ratioForm.baseline, names.contender.map((name) => [name]), baseline);
fill(ratioForm.workload, names.workload.map((name) => [name]));
fill(ratioForm.durability, names.durability.map((name) => [name]));

const ratiosTo = (base, one, more) => Object.keys(one.by)
  .filter((group) => base.by[group] > 0 && one.by[group] > 0)
  .map((group) => (more ? one.by[group] / base.by[group] : base.by[group] / one.by[group]));

const ratioCell = (contender, compacted, [, phase, other, metric, more]) => {
  const { baseline: base, workload, durability } = ratioForm;
  const at = (name, when) => index.get(keyed(workload.value, durability.value, name, when, metric));
  const one = at(contender, compacted ? other : phase);
  const reference = at(base.value, phase);
  const ratios = one && reference ? ratiosTo(reference, one, more) : [];
  const cell = element("td", ratios.length ? `${times(median(ratios))}×` : "–", { class: "number" });
  if (ratios.length > 1)
    cell.append(element("small", `${times(Math.min(...ratios))} to ${times(Math.max(...ratios))}`));
  return cell;
};

const showRatios = () => {
  const table = document.getElementById("ratio-table");
  const { baseline: base, workload, durability } = ratioForm;
  find("caption", table).textContent =
    `Times better than ${base.value}, with ${workload.value}, durability ${durability.value}.`;
  const head = element("tr");
  head.append(element("th", "Contender", { scope: "col" }),
    ...questions.map(([name]) => element("th", name, { scope: "col", class: "number" })));
  find("thead", table).replaceChildren(head);
  const rows = [];
  names.contender.forEach((contender, at) => {
    for (const compacted of [false, true]) {
      const shown = questions.map((question) => ratioCell(contender, compacted, question));
      if (shown.every((cell) => cell.textContent === "–")) continue;
      const row = element("tr", "", { class: kinds[at] });
      row.append(element("th", compacted ? `${contender}, compacted` : contender, { scope: "row" }), ...shown);
      rows.push(row);
    }
  });
  find("tbody", table).replaceChildren(...rows);
};
ratioForm.addEventListener("change", showRatios);
ratioForm.addEventListener("submit", (event) => event.preventDefault());
showRatios();

/* All figures: filtered, sorted, the first of them shown. */
const FIRST = 100;
const HEADINGS = [
  ["contender", "Contender"], ["phase", "Phase"], ["median", "Median"], ["low", "Lowest"], ["high", "Highest"],
  ["metric", "Metric"], ["workload", "Workload"], ["durability", "Durability"], ["repetitions", "Repetitions"],
];
const figureForm = document.getElementById("figure-choices");
const figureTable = document.getElementById("figure-table");
const more = document.getElementById("figure-more");
const NUMBERS = new Set(["median", "low", "high", "repetitions"]);
let sorting = { column: "", descending: false };
let showAll = false;

for (const column of ["workload", "durability", "phase", "metric"])
  fill(figureForm[column], [["", "all"], ...names[column].map((name) => [name, name.replaceAll("_", " ")])]);
figureForm.metric.value = names.metric.includes("messages_per_second") ? "messages_per_second" : "";

const headings = element("tr");
for (const [column, text] of HEADINGS) {
  const heading = element("th", "", { scope: "col", "data-column": column, "aria-sort": "none" });
  if (NUMBERS.has(column)) heading.className = "number";
  const button = heading.appendChild(element("button", text, { type: "button" }));
  button.addEventListener("click", () => {
    sorting = { column, descending: sorting.column === column ? !sorting.descending : NUMBERS.has(column) };
    showFigures();
  });
  headings.append(heading);
}
find("thead", figureTable).append(headings);

const wanted = (one) =>
  ["workload", "durability", "phase", "metric"].every((column) => !figureForm[column].value || figureForm[column].value === one[column])
  && one.contender.toLowerCase().includes(figureForm.contender.value.trim().toLowerCase());

const compared = (one, other, column) => {
  if (NUMBERS.has(column)) return one[column] - other[column];
  return column === "phase" ? one.order - other.order : one[column].localeCompare(other[column]);
};

const figureRow = (one) => {
  const row = element("tr", "", { class: one.kind });
  for (const [column] of HEADINGS) {
    const isQuantity = ["median", "low", "high"].includes(column);
    const text = isQuantity ? `${figure(one[column], one.unit)}${column === "median" ? ` ${one.unit}` : ""}` : column === "metric" ? one.metric.replaceAll("_", " ") : one[column];
    row.append(column === "contender" ? element("th", text, { scope: "row" })
      : element("td", text, NUMBERS.has(column) ? { class: "number" } : {}));
  }
  return row;
};

const showFigures = () => {
  const found = figures.filter(wanted);
  const { column, descending } = sorting;
  if (column) found.sort((a, b) => compared(a, b, column) * (descending ? -1 : 1));
  for (const heading of headings.children) {
    const state = descending ? "descending" : "ascending";
    heading.setAttribute("aria-sort", heading.dataset.column === column ? state : "none");
  }
  const shown = showAll ? found : found.slice(0, FIRST);
  find("tbody", figureTable).replaceChildren(...shown.map(figureRow));
  document.getElementById("figure-count").textContent = `${shown.length} of ${found.length} shown, of ${figures.length} in all`;
  more.hidden = shown.length === found.length;
};
more.addEventListener("click", () => { showAll = true; showFigures(); });
figureForm.addEventListener("input", () => { showAll = false; showFigures(); });
figureForm.addEventListener("submit", (event) => event.preventDefault());
showFigures();
