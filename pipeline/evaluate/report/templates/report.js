"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const data = JSON.parse(document.getElementById("data").textContent);

  // A select shows those of its group that have the key chosen.
  for (const select of all("select[data-picks]")) {
    const group = all('[data-group="' + select.dataset.picks + '"]');
    const pick = () => group.forEach((one) => { one.hidden = one.dataset.key !== select.value; });
    select.addEventListener("change", pick);
    pick();
  }

  // Numbers beside a chart are those of the ratio pointed at; the method pointed at stands out.
  for (const chart of all(".lines")) {
    const tables = all(".readings table", chart), stops = all(".stop", chart);
    const guide = chart.querySelector(".guide");
    function at(stop) {
      tables.forEach((table) => { table.hidden = table.dataset.stop !== stop.dataset.stop; });
      stops.forEach((one) => one.setAttribute("aria-pressed", String(one === stop)));
      guide.setAttribute("d", "M" + stop.dataset.x + " 0V100");
    }
    for (const stop of stops) for (const event of ["pointerenter", "focus", "click"]) stop.addEventListener(event, () => at(stop));
    for (const row of all(".readings tr", chart)) {
      const series = all(".series", chart).find((one) => one.dataset.method === row.dataset.method);
      if (!series) continue;
      row.addEventListener("pointerenter", () => { chart.classList.add("dim"); series.classList.add("on"); });
      row.addEventListener("pointerleave", () => { chart.classList.remove("dim"); series.classList.remove("on"); });
    }
    if (stops.length) at(stops[stops.length - 1]);
  }

  const filters = Object.fromEntries(all("[data-filter]").map((select) => [select.dataset.filter, select]));
  if (!filters.ratio) return;
  const step = 20, cards = all(".card"), more = document.getElementById("more");
  let room = step;

  // How many there are in all, on this page or not: row 0 and column 0 stand for any method.
  function inAll(ratio, right, wrong) {
    const tables = ratio ? [data.counts[ratio]] : Object.values(data.counts);
    const place = (method) => (method === "" ? 0 : Number(method) + 1);
    return tables.reduce((sum, table) => sum + table[place(right)][place(wrong)], 0);
  }

  function show() {
    const [ratio, right, wrong] = ["ratio", "right", "wrong"].map((name) => filters[name].value);
    const has = (list, method) => method === "" || list.split(" ").includes(method);
    const matches = cards.filter((card) =>
      (!ratio || card.dataset.ratio === ratio) && has(card.dataset.right, right) && has(card.dataset.wrong, wrong));
    const shown = new Set(matches.slice(0, room));
    cards.forEach((card) => { card.hidden = !shown.has(card); });
    more.hidden = matches.length <= room;
    const total = inAll(ratio, right, wrong);
    const words = [total.toLocaleString("en") + " in all"];
    if (matches.length < total) words.push(matches.length + " on this page");
    if (shown.size < matches.length) words.push("the first " + shown.size + " shown");
    document.getElementById("matches").textContent = words.join(", ");
  }

  for (const select of Object.values(filters)) select.addEventListener("change", () => { room = step; show(); });
  more.addEventListener("click", () => { room += step; show(); });
  show();
})();
