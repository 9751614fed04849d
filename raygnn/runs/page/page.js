"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function layout(chart) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: color("--line"), zeroline: false, linecolor: color("--line"), automargin: true };
    const own = chart.layout;
    const categories = own.yaxis && own.yaxis.type === "category";
    return {
      ...own,
      height: chart.height,
      autosize: true,
      margin: { l: 48, r: 12, t: 8, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--quiet") },
      hovermode: own.hovermode || "x unified",
      hoverlabel: { bgcolor: color("--panel"), bordercolor: color("--line"), font: { color: color("--text") } },
      legend: { orientation: "h", y: 1.0, yanchor: "bottom", x: 0, traceorder: "normal" },
      xaxis: { ...axis, title: { text: "step", standoff: 6, font: { size: 12 } }, ...(own.xaxis || {}) },
      yaxis: { ...axis, ...(own.yaxis || {}), ...(categories ? { showgrid: false } : {}) },
    };
  }

  function draw(element) {
    const chart = charts[element.dataset.chart];
    const options = { displayModeBar: false, responsive: true };
    return Plotly.react(element, structuredClone(chart.traces), layout(chart), options);
  }

  // compressed: it is most of the page
  async function load() {
    const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  const elements = [...document.querySelectorAll("[data-chart]")];
  const all = () => Promise.all(elements.map(draw));
  const ready = elements.length ? load() : Promise.resolve();
  ready.then(all).then(() => { document.body.dataset.drawn = elements.length; });
  dark.addEventListener("change", () => ready.then(all));
})();
