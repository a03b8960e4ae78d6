"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const slider = document.getElementById("tier");
  const tiles = [...document.querySelectorAll(".tile")];
  const counts = [...document.querySelectorAll(".count")];
  const [rows, columns] = data.grid || [1, 1];
  document.body.classList.toggle("plain", !data.grid);

  // The first `kept` of the order of selection, frame by frame: a Set of places each, and how many tokens that was.
  function selection(kept) {
    const frames = Array.from({ length: data.frames }, () => ({ places: new Set(), tokens: 0 }));
    for (const index of data.order.slice(0, kept)) {
      const frame = frames[Math.floor(index / data.perFrame)];
      frame.places.add(index % data.perFrame);
      frame.tokens += 1;
    }
    return frames;
  }

  // Kept places are holes in the veil; lines run where a kept place borders on another kind of place.
  function drawTile(tile, places) {
    let holes = "", edges = "";
    for (const place of places) {
      const x = place % columns, y = Math.floor(place / columns);
      holes += "M" + x + " " + y + "h1v1h-1z";
      if (x === 0 || !places.has(place - 1)) edges += "M" + x + " " + y + "v1";
      if (x === columns - 1 || !places.has(place + 1)) edges += "M" + (x + 1) + " " + y + "v1";
      if (y === 0 || !places.has(place - columns)) edges += "M" + x + " " + y + "h1";
      if (y === rows - 1 || !places.has(place + columns)) edges += "M" + x + " " + (y + 1) + "h1";
    }
    const veil = "M0 0H" + columns + "V" + rows + "H0z" + holes;
    tile.querySelector(".drain").setAttribute("d", veil);
    tile.querySelector(".veil").setAttribute("d", veil);
    tile.querySelector(".edge").setAttribute("d", edges);
    tile.dataset.lit = places.size;
  }

  // Draw a chart of a value a frame: grid, the `shapes` at the height that is given them, and a link to each frame.
  // Only numbers become markup. Returns the value at the top.
  function drawChart(id, values, shapes) {
    const highest = Math.max(...values), power = 10 ** Math.floor(Math.log10(highest / 4 || 1));
    const step = power * [1, 2, 5, 10].find((size) => 4 * size * power >= highest * 0.999);
    const ticks = Array.from({ length: Math.max(1, Math.ceil(highest / step - 1e-9)) + 1 }, (_, i) => i * step);
    const top = ticks.at(-1), n = values.length, chart = document.getElementById(id);
    const label = (side, percent, text) => `<span style="${side}:${percent}%">${text}</span>`;
    const every = Math.ceil(n / 8);
    chart.querySelector(".y").innerHTML =
      ticks.map((tick) => label("bottom", 100 * tick / top, +tick.toPrecision(6))).join("");
    chart.querySelector(".x").innerHTML = data.seconds
      .map((at, t) => t % every ? "" : label("left", 100 * (t + 0.5) / n, +at.toFixed(1))).join("");
    chart.querySelector("svg").innerHTML =
      ticks.map((tick) => `<path class="grid" d="M0 ${100 - 100 * tick / top}H${n}"/>`).join("")
      + shapes(values.map((value) => 100 * value / top))
      + data.seconds.map((at, t) => `<a href="#t${t}" tabindex="-1"><rect class="hit" x="${t}" width="1" height="100">`
        + `<title>t ${t}, ${at.toFixed(2)} s</title></rect></a>`).join("");
    return top;
  }

  function drawDensity(heights) {
    const points = heights.map((height, t) => (t + 0.5) + " " + (100 - height));
    const line = points.join("L");
    // Round caps on lines of no length: dots that stretching leaves round.
    return `<path class="area" d="M0.5 100L${line}L${heights.length - 0.5} 100z"/><path class="line" d="M${line}"/>`
      + `<path class="dots" d="${points.map((point) => "M" + point + "h0").join("")}"/>`;
  }

  // The shadows behind the bars stay at what is stored.
  function drawBars(heights) {
    const bar = (name) => (height, t) =>
      `<rect class="${name}" x="${t + 0.12}" width="0.76" y="${100 - height}" height="${height}"/>`;
    return heights.map(bar("shadow")).join("") + heights.map(bar("bar")).join("");
  }

  if (data.density) drawChart("density", data.density, drawDensity);
  const top = drawChart("kept-per-frame", selection(data.order.length).map((frame) => frame.tokens), drawBars);
  const bars = [...document.querySelectorAll(".bar")];

  function show(tier) {
    const frames = selection(tier.kept);
    frames.forEach((frame, t) => {
      if (data.grid) drawTile(tiles[t], frame.places);
      const height = 100 * frame.tokens / top;
      bars[t].setAttribute("y", 100 - height);
      bars[t].setAttribute("height", height);
      const share = frame.tokens + " of " + data.perFrame + " tokens kept";
      tiles[t].setAttribute("aria-label", tiles[t].dataset.name + ": " + share);
      counts[t].innerHTML = "<b>" + frame.tokens + "</b> / " + data.perFrame;
    });
    document.getElementById("ratio").textContent = tier.label;
    document.getElementById("kept").textContent = tier.kept.toLocaleString("en");
    if (slider) slider.setAttribute("aria-valuetext", tier.label + ", " + tier.kept + " tokens");
    window.state = { ratio: tier.ratio, kept: tier.kept, counts: frames.map((frame) => frame.tokens) };
  }

  const update = () => show(data.tiers[slider ? Number(slider.value) : 0]);
  if (slider) slider.addEventListener("input", update);
  update();
})();
