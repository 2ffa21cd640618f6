document.querySelectorAll("table.sortable").forEach(table => {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const more = document.createElement("button"), step = 100;
  let shown = step;
  const page = () => {
    [...body.rows].forEach((row, place) => { row.hidden = place >= shown; });
    more.textContent = `show ${Math.min(step, body.rows.length - shown)} more of ${body.rows.length}`;
    more.hidden = shown >= body.rows.length;
  };
  more.type = "button";
  more.className = "more";
  more.addEventListener("click", () => { shown += step; page(); });
  table.parentElement.after(more);
  page();
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
        const apart = isNaN(one - two) ? one.localeCompare(two) : one - two;
        return up ? apart : -apart;
      }).forEach(row => body.append(row));
      page();
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
const mark = () => document.querySelectorAll(".scroll").forEach(box => {
  const sign = box.previousElementSibling, wide = box.scrollWidth > box.clientWidth + 1;
  sign.classList.toggle("needed", wide);
  sign.classList.toggle("free", !wide);
});
mark();
addEventListener("resize", mark);
