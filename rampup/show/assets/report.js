"use strict";
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const toggle = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const named = () => { toggle.textContent = dark() ? "Light theme" : "Dark theme"; };
  toggle.hidden = false;
  toggle.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; named(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", named);
  named();

  const written = (value) => value === null ? "not finite"
    : Number.isInteger(value) ? value.toLocaleString("en-US") : Number(value.toPrecision(4)).toLocaleString("en-US", {maximumSignificantDigits: 4});

  function show(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4)) + "px";
    tip.style.top = (y - box.height - 12 > 4 ? y - box.height - 12 : y + 18) + "px";
  }
  const hide = () => { tip.hidden = true; };

  // The number of the last x that is not above the value; xs increase.
  function before(xs, value) {
    let low = 0, high = xs.length;
    while (low < high) { const middle = (low + high) >> 1; if (xs[middle] <= value) low = middle + 1; else high = middle; }
    return Math.max(low - 1, 0);
  }
  function nearest(line, value) {
    const left = before(line.x, value), right = Math.min(left + 1, line.x.length - 1);
    return (line.kind === "line" || line.kind === "dots") && Math.abs(line.x[right] - value) < Math.abs(line.x[left] - value) ? right : left;
  }

  function chart(svg) {
    const data = JSON.parse(svg.dataset.chart);
    const [x0, x1] = data.view, [left, , width] = data.box;
    const cursor = svg.querySelector(".cursor"), main = data.series[0];
    let at = 0;
    function read(value, clientX, clientY) {
      const lines = [];
      const band = data.bands.find(([start, end]) => value >= start && value < end);
      const exact = main.kind === "steps" ? Math.min(value, x1) : main.x[nearest(main, value)];
      lines.push(`${data.x.split(";")[0]}: ${written(main.kind === "bars" ? Math.min(exact + 0.5, x1 - 0.5) : Math.round(exact))}`);
      if (band) lines.push(`phase ${band[2]}`);
      for (const line of data.series) lines.push(`${line.name}: ${written(line.y[nearest(line, value)])}`);
      const x = left + (exact - x0) / (x1 - x0) * width;
      cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.removeAttribute("hidden");
      show(lines.join("\n"), clientX, clientY);
    }
    const close = () => { cursor.setAttribute("hidden", ""); hide(); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const share = ((event.clientX - box.left) * scale - left) / width;
      const value = x0 + Math.min(Math.max(share, 0), 1) * (x1 - x0);
      at = nearest(main, value);
      read(value, event.clientX, event.clientY);
    });
    function point() {
      const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
      read(main.x[at], box.left + (left + (main.x[at] - x0) / (x1 - x0) * width) * scale, box.top + box.height / 3);
    }
    svg.addEventListener("keydown", (event) => {
      const last = main.x.length - 1, far = event.shiftKey ? Math.max(10, Math.round(last / 20)) : 1;
      const to = {ArrowRight: at + far, ArrowLeft: at - far, Home: 0, End: last}[event.key];
      if (event.key === "Escape") close();
      if (to === undefined) return;
      event.preventDefault();
      at = Math.min(Math.max(to, 0), last);
      point();
    });
    svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) point(); });
    svg.addEventListener("pointerleave", close);
    svg.addEventListener("blur", close);
  }

  function timetable(svg) {
    const blocks = [...svg.querySelectorAll("[data-tip]")];
    let at = -1;
    const leave = () => { blocks.forEach((block) => block.classList.remove("here")); hide(); };
    const enter = (block, x, y) => { leave(); block.classList.add("here"); show(block.dataset.tip, x, y); };
    svg.addEventListener("pointermove", (event) => {
      const block = event.target.closest("[data-tip]");
      if (block) { at = blocks.indexOf(block); enter(block, event.clientX, event.clientY); } else leave();
    });
    svg.addEventListener("keydown", (event) => {
      const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: blocks.length - 1}[event.key];
      if (event.key === "Escape") leave();
      if (to === undefined) return;
      event.preventDefault();
      at = Math.min(Math.max(to, 0), blocks.length - 1);
      blocks[at].scrollIntoView({block: "nearest", inline: "nearest"});
      const box = blocks[at].getBoundingClientRect();
      enter(blocks[at], box.left, box.top);
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
  }

  document.querySelectorAll("svg.plot").forEach(chart);
  document.querySelectorAll("svg.timetable").forEach(timetable);
  addEventListener("scroll", hide, {passive: true});

  const filter = document.getElementById("filter");
  if (filter) {
    filter.hidden = false;
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase();
      document.querySelectorAll(".keys tbody tr").forEach((row) => { row.hidden = !row.textContent.toLowerCase().includes(words); });
      document.querySelectorAll("#keys details").forEach((section) => {
        section.hidden = !section.querySelector("tbody tr:not([hidden])");
        if (words) section.open = true;
      });
    });
  }
})();
