"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const slider = document.getElementById("tier");
  const tiles = [...document.querySelectorAll(".tile")];
  const counts = [...document.querySelectorAll(".count")];
  const bars = document.getElementById("bars");
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

  function drawBar(bar, tokens) {
    const height = 100 * tokens / Number(bars.dataset.top);
    bar.setAttribute("y", 100 - height);
    bar.setAttribute("height", height);
  }

  function show(tier) {
    const frames = selection(tier.kept);
    frames.forEach((frame, t) => {
      if (data.grid) drawTile(tiles[t], frame.places);
      drawBar(bars.children[t], frame.tokens);
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
