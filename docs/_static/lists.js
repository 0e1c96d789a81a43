// Marks the tables that site.css shows as lists: those of four columns or more that are wider than their place.
function markLists() {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const labels = [...table.querySelectorAll("thead th")].map((heading) => heading.textContent.trim());
    table.classList.remove("listed");
    table.classList.toggle("listed", labels.length >= 4 && table.offsetWidth > table.parentElement.clientWidth);
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, i) => {
        const text = cell.textContent.trim();
        cell.dataset.label = labels[i];
        cell.classList.toggle("empty", text === "" || text === "-");
        cell.classList.toggle("sentence", text.length > 40);
      });
    }
  }
}

addEventListener("load", markLists);
addEventListener("resize", markLists);
