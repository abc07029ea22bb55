"use strict";
(() => {
  const root = document.documentElement;
  const toggle = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const label = () => { toggle.textContent = dark() ? "Light theme" : "Dark theme"; };
  toggle.hidden = false;
  toggle.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();

  const filter = document.getElementById("filter");
  if (filter) {
    filter.hidden = false;
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase();
      document.querySelectorAll("#keys tbody tr").forEach((row) => { row.hidden = !row.textContent.toLowerCase().includes(words); });
      document.querySelectorAll("#keys details").forEach((section) => {
        section.hidden = !section.querySelector("tbody tr:not([hidden])");
        if (words) section.open = true;
      });
    });
  }
})();
