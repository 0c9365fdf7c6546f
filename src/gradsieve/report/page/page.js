"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const chooser = document.getElementById("chooser");
  const one = document.getElementById("one");
  const views = new Map();
  const shown = { methods: new Set(page.methods.keys()), seed: "mean", first: 0, last: page.steps, run: null };

  // ---- what each chart draws, as the reader has chosen

  function curveRows(series) {
    const rows = [];
    for (const each of series) {
      for (const number of shown.methods) {
        const several = Object.keys(each.runs[number]).length > 1;
        const values = shown.seed === "mean" ? each.mean[number] : { value: each.runs[number][shown.seed] || [] };
        const before = rows.length;
        each.step.forEach((step, i) => {
          const value = values.value[i];
          if (value === null || value === undefined || step < shown.first || step > shown.last) return;
          const row = { variant: page.methods[number].name, step, value };
          if (each.kind) row.kind = each.kind;
          if (shown.seed !== "mean") row.range = `seed ${shown.seed}`;
          else if (several) {
            row.low = values.low[i];
            row.high = values.high[i];
            row.range = `${row.low} to ${row.high}`;
          } else row.range = "one";
          rows.push(row);
        });
        if (rows.length === before + 1) rows[before].alone = true;
        if (each.test && shown.last === page.steps) rows.push(...testRows(each.test[number], page.methods[number].name));
      }
    }
    return rows;
  }

  function testRows(bySeed, variant) {
    const values = shown.seed === "mean" ? Object.values(bySeed) : [bySeed[shown.seed]].filter((value) => value !== undefined);
    if (!values.length) return [];
    const test = values.reduce((sum, value) => sum + value, 0) / values.length;
    return [{ variant, step: page.steps, test, range: shown.seed === "mean" ? `${values.length}` : `seed ${shown.seed}` }];
  }

  // A run's data are rows already, or lines: an object of equally long lists and of values that all their points share.
  function detailRows(key) {
    const data = (page.details[shown.run] || {})[key] || [];
    return data.flatMap((line) => {
      const lists = Object.keys(line).filter((name) => Array.isArray(line[name]));
      if (!lists.length) return [line];
      return line[lists[0]].map((_, i, all) => {
        const row = { ...line };
        if (all.length === 1) row.alone = true;
        lists.forEach((name) => (row[name] = line[name][i]));
        return row;
      });
    }).filter((row) => row.value !== null);
  }

  function rowsOf(chart) {
    if (chart.kind === "curve") return curveRows(chart.data);
    return chart.kind === "detail" ? detailRows(chart.data) : chart.data;
  }

  // ---- drawing

  async function draw(figure) {
    const chart = page.charts[figure.dataset.chart];
    const plot = figure.querySelector(".plot");
    const caption = figure.querySelector("figcaption");
    const rows = rowsOf(chart);
    figure.querySelector(".absent").hidden = rows.length > 0;
    plot.hidden = rows.length === 0;
    if (!rows.length) return;
    let view = views.get(figure);
    if (!view) {
      const spec = { ...chart.spec, description: `${caption.innerText.replace(/\s+/g, " ")} All figures are in the table below.` };
      spec.datasets = { rows };
      const options = { actions: false, renderer: "svg", mode: "vega-lite", ast: true, logLevel: 1 };
      view = (await vegaEmbed(plot, spec, options)).view;
      views.set(figure, view);
      if (chart.kind === "curve") zoomable(plot, view);
    }
    if (chart.kind === "curve") view.signal("first", shown.first).signal("last", shown.last);
    view.data("rows", rows);
    await view.resize().runAsync();
    for (const cells of plot.querySelectorAll("svg [class*=voronoi]")) {  // they only catch the pointer
      for (const name of ["role", "aria-roledescription"]) cells.removeAttribute(name);
      cells.setAttribute("aria-hidden", "true");
    }
    const table = figure.querySelector(".figures");
    if (table.open) tabulate(table, rows);
  }

  async function drawAll(kinds) {
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      if (kinds.includes(page.charts[figure.dataset.chart].kind)) await draw(figure);
    }
  }

  function tabulate(details, rows) {
    const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => !["order", "alone"].includes(name) && (!["low", "high"].includes(name) || !("value" in rows[0])));
    const table = document.createElement("table");
    const add = (row, kind, text, scope) => {
      const cell = row.appendChild(document.createElement(kind));
      cell.textContent = text;
      if (scope) cell.scope = scope;
    };
    const head = table.createTHead().insertRow();
    names.forEach((name) => add(head, "th", name === "variant" ? "method" : name, "col"));
    const body = table.createTBody();
    rows.slice(0, 2000).forEach((row) => {
      const line = body.insertRow();
      names.forEach((name, i) => add(line, i ? "td" : "th", row[name] ?? "", i ? "" : "row"));
    });
    details.querySelector(".scroll").replaceChildren(table);
  }

  // ---- choosing

  function choose() {
    const form = new FormData(chooser);
    shown.methods = new Set(form.getAll("method").map(Number));
    shown.seed = form.get("seed") || "mean";
    const [first, last] = ["first", "last"].map((name) => Math.round(Number(form.get(name))));
    if (last > first) Object.assign(shown, { first: Math.max(0, first), last: Math.min(page.steps, last) });
    const names = [...shown.methods].map((number) => page.methods[number].name);
    const seeds = shown.seed === "mean" ? "" : `, seed ${shown.seed}`;
    chooser.querySelector(".said").textContent = `Showing ${names.join(", ") || "nothing"}${seeds}, steps ${shown.first} to ${shown.last}.`;
    return drawAll(["curve"]);
  }

  function zoomTo(first, last) {
    chooser.elements.first.value = first;
    chooser.elements.last.value = last;
    choose();
  }

  function chooseRun() {
    shown.run = one.elements.run.value;
    let found = false;
    for (const part of document.querySelectorAll("[data-run]")) {
      part.hidden = part.dataset.run !== shown.run;
      found ||= !part.hidden;
    }
    const missing = document.getElementById("no-pictures");
    if (missing) missing.hidden = found;
    return drawAll(["detail"]);
  }

  function zoomable(plot, view) {
    plot.classList.add("zooms");
    let start = null, brush = null;
    const place = (event) => {
      const left = view.origin()[0];
      const x = event.clientX - plot.getBoundingClientRect().left;
      return Math.min(Math.max(x, left), left + view.signal("width"));
    };
    plot.addEventListener("pointerdown", (event) => { if (event.button === 0) start = place(event); });
    window.addEventListener("pointermove", (event) => {
      if (start === null) return;
      const end = place(event);
      brush ||= plot.appendChild(Object.assign(document.createElement("div"), { className: "brush" }));
      Object.assign(brush.style, { left: `${Math.min(start, end)}px`, width: `${Math.abs(end - start)}px` });
    });
    const stop = (event) => {
      if (start === null) return;
      const ends = [start, place(event)].sort((a, b) => a - b);
      start = null;
      brush?.remove();
      brush = null;
      if (event.type === "pointercancel" || ends[1] - ends[0] < 8) return;
      const [first, last] = ends.map((x) => Math.round(view.scale("x").invert(x - view.origin()[0])));
      if (last > first) zoomTo(first, last);
    };
    window.addEventListener("pointerup", stop);
    window.addEventListener("pointercancel", stop);
    plot.addEventListener("dblclick", () => zoomTo(0, page.steps));
  }

  function themes() {
    const button = document.getElementById("theme");
    const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    const name = () => (button.textContent = dark() ? "Light" : "Dark");
    button.hidden = false;
    button.addEventListener("click", () => {
      document.documentElement.dataset.theme = dark() ? "light" : "dark";
      name();
    });
    name();
  }

  themes();
  chooser?.addEventListener("submit", (event) => event.preventDefault());
  chooser?.addEventListener("change", choose);
  chooser?.elements.all.addEventListener("click", () => zoomTo(0, page.steps));
  one?.addEventListener("submit", (event) => event.preventDefault());
  one?.addEventListener("change", chooseRun);
  for (const details of document.querySelectorAll(".figures")) {
    details.addEventListener("toggle", () => details.open && tabulate(details, rowsOf(page.charts[details.closest("figure").dataset.chart])));
  }
  (async () => {
    await drawAll(["rows"]);
    if (chooser) await choose();
    if (one) await chooseRun();
    document.documentElement.dataset.drawn = "yes";
  })();
  window.gradsieve = { views, shown };
})();
