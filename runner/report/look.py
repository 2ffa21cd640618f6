"""How the page looks, and the little that moves in it. It reads as well without the script."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d5dae0; --box: #f5f6f8;
  --good: #0a6b3d; --bad: #b3261e; --warn: #7a4b00; --focus: #0b57d0;
  --bar: #adc4e8; --edge: #35588f; --hatch: #8a94a0; --whisker: #111418;
  --c0: #0b5cad; --c1: #b3420e; --c2: #00725a; --c3: #84439c; --c4: #6f5a00; --c5: #b0206f;
  --c6: #45606f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --ink: #e6e9ed; --soft: #a3adb8; --line: #343b44; --box: #1d2228;
    --good: #6fd39b; --bad: #ff9a90; --warn: #f0c064; --focus: #8ab4f8;
    --bar: #31496f; --edge: #8fb0e6; --hatch: #8e98a4; --whisker: #fff;
    --c0: #7ab8f5; --c1: #f3a06b; --c2: #5fd1ae; --c3: #cfa3e3; --c4: #dcc35a; --c5: #f08cc0;
    --c6: #a9c3d2;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main { max-width: 72rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
.kind { color: var(--soft); margin: 0; }
h1 { font-size: 1.15rem; font-weight: 600; margin: 0 0 1.5rem; }
h2 { font-size: 1.25rem; font-weight: 650; margin: 3.5rem 0 .35rem; line-height: 1.3; }
h3 { font-size: 1rem; font-weight: 600; margin: 1.6rem 0 .2rem; }
.lead {
  font-size: clamp(1.3rem, 1rem + 1.6vw, 1.85rem); line-height: 1.35; margin: 0 0 1rem;
  max-width: 46rem; letter-spacing: -.01em; text-wrap: pretty;
}
.lead.long { font-size: clamp(1.15rem, 1rem + .8vw, 1.4rem); }
.about, .note { color: var(--soft); max-width: 46rem; margin: .2rem 0 1rem; }
.said-too { max-width: 46rem; margin: .35rem 0; }
.warning, .shout { border-left: 4px solid var(--warn); padding: .4rem .9rem;
  background: var(--box); }
.shout { border-left: 10px double var(--bad); font-weight: 650; }
.facts { color: var(--soft); margin: 1.25rem 0 0; padding: 0; list-style: none;
  display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; font-size: .9rem; }
svg { display: block; width: 100%; overflow: visible; }
svg text { font: 12px/1 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  fill: var(--soft); }
svg text.name { fill: var(--ink); font-size: 13px; }
.lead-line { stroke: var(--soft); stroke-width: 1; }
.defs { position: absolute; width: 0; height: 0; }
.grid { stroke: var(--line); stroke-width: 1; }
.frame { stroke: var(--soft); stroke-width: 1; }
.one { stroke: var(--ink); stroke-width: 1.5; }
.floor { fill: url(#hatch); }
.hatch { stroke: var(--hatch); stroke-width: 1.5; }
.whisker { stroke: var(--whisker); stroke-width: 2; }
.bars { list-style: none; margin: 1rem 0 0; padding: 0; }
.bar { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem;
  margin: 0 0 .35rem; }
.bar .label { font-weight: 600; }
.bar .said { font-variant-numeric: tabular-nums; color: var(--soft); }
.bar svg { flex: 0 0 100%; }
.bar .fill { fill: var(--bar); stroke: var(--edge); stroke-width: 1.5; }
.bar.reference .fill, .bar.hint .fill, .bar.unclear .fill { fill: var(--paper); }
.bar.hint .fill { stroke-dasharray: 5 3; }
.bar.slower .fill { fill: var(--box); stroke: var(--soft); stroke-width: 2.5; }
.bar.fail .fill { fill: url(#cross); stroke: var(--bad); stroke-width: 2; }
.cross { stroke: var(--bad); stroke-width: 2; }
.bar.fail .said, .fail-text { color: var(--bad); font-weight: 650; }
@media (min-width: 46rem) {
  .bar { display: grid; grid-template-columns: 13rem 1fr 15rem; align-items: center; margin: 0; }
  .bar svg { grid-column: 2; grid-row: 1; }
  .bar .label { grid-column: 1; grid-row: 1; line-height: 1.25; padding: .3rem 0; }
  .bar .said { grid-column: 3; grid-row: 1; text-align: left; }
  .bar-axis { margin: 0 16rem 0 14rem; }
}
.plot { display: grid; grid-template-columns: 58px 1fr; margin: 1rem 12px 0 0; max-width: 52rem; }
.plot .y-title { grid-column: 1 / -1; color: var(--soft); font-size: .85rem; margin-bottom: 10px; }
.plot .x-title { grid-column: 2; color: var(--soft); font-size: .85rem; text-align: right; }
.plot .x-axis { grid-column: 2; }
.y-axis { width: 58px; }
.curve { fill: none; stroke: currentColor; stroke-width: 2; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; }
.marker { fill: currentColor; stroke: var(--paper); stroke-width: 1.5; overflow: visible; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.c6 { color: var(--c6); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; padding: 0;
  margin: .8rem 0 0; font-size: .9rem; }
.legend li { display: flex; gap: .5rem; align-items: center; min-width: 0; }
.legend svg { width: 36px; flex: none; }
.scroll { overflow-x: auto; margin: 1rem 0 0; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .7rem; text-align: right; white-space: nowrap; vertical-align: top;
  border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { color: var(--soft); font-weight: 600; background: var(--box); vertical-align: bottom;
  white-space: normal; overflow-wrap: normal; }
th:first-child, tbody th, thead .stick { text-align: left; }
tbody th { font-weight: 600; white-space: normal; min-width: 8.5rem; max-width: 22rem; }
.long tbody th { min-width: clamp(8.5rem, 38vw, 18rem); }
tbody th, thead .stick { position: sticky; left: 0; background: var(--paper);
  box-shadow: 1px 0 0 var(--line); }
thead .stick { background: var(--box); }
thead button { all: unset; cursor: pointer; }
thead button:focus-visible { outline: 2px solid var(--focus); outline-offset: 3px; }
thead [aria-sort] button::after { content: " ↓"; }
thead [aria-sort="ascending"] button::after { content: " ↑"; }
.matrix td, .matrix thead th + th { text-align: center; }
.matrix td sup { color: var(--soft); }
.reasons { padding-left: 1.6rem; max-width: 46rem; }
.reasons .who { color: var(--soft); }
.failures dt { font-weight: 600; margin-top: .8rem; }
.failures dd { margin: 0; white-space: pre-wrap; }
.command { display: flex; gap: .5rem; align-items: stretch; margin: .25rem 0 .9rem; }
pre { flex: 1; min-width: 0; overflow-x: auto; margin: 0; padding: .55rem .8rem;
  background: var(--box); border: 1px solid var(--line); border-radius: 6px; }
code, pre { font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  monospace; }
.command button { font: inherit; font-size: .85rem; color: var(--ink); background: var(--paper);
  border: 1px solid var(--soft); border-radius: 6px; padding: 0 .8rem; cursor: pointer; }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
.machine { margin: 1rem 0 0; max-width: 46rem; }
.machine dt { color: var(--soft); } .machine dd { margin: 0 0 .4rem; }
@media (min-width: 34rem) {
  .machine { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.5rem; }
  .machine dd { margin: 0; }
}
footer { color: var(--soft); margin-top: 4rem; font-size: .85rem; border-top: 1px solid var(--line);
  padding-top: 1rem; }
@media print {
  :root { --paper: #fff; --ink: #000; --soft: #444; --line: #bbb; --box: #fff; --whisker: #000;
    --bar: #ddd; --edge: #000; --bad: #000; --warn: #000; --good: #000; --hatch: #888; }
  body { font-size: 10.5pt; } main { max-width: none; padding: 0; }
  h2 { margin-top: 1.6rem; break-after: avoid; } .bar, tr, .plot, dd { break-inside: avoid; }
  .scroll { overflow: visible; border: 0; } .scroll table { font-size: 7.5pt; }
  th, td { padding: .2rem .35rem; white-space: normal; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; } .command button { display: none; }
  .bar .fill { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""

SCRIPT = """
document.querySelectorAll("table.sortable").forEach(table => {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => row.cells[place].dataset.sort;
      [...body.rows].sort((a, b) => {
        const one = key(a), two = key(b);
        if (one === undefined || two === undefined)
          return (one === undefined) - (two === undefined);
        const apart = head.dataset.text ? one.localeCompare(two) : one - two;
        return up ? apart : -apart;
      }).forEach(row => body.append(row));
    });
  });
});
document.querySelectorAll(".command").forEach(box => {
  const text = box.querySelector("code"), button = document.createElement("button");
  button.type = "button";
  button.textContent = "copy";
  button.setAttribute("aria-label", "copy the command of " + box.dataset.of);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(text);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });
  box.append(button);
});
"""
