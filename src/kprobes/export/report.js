"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

  function draw(chart) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const isNarrow = chart.clientWidth < 560;
    const { data, layout } = structuredClone(figures[chart.id]);
    for (const trace of data) {
      const own = color(trace.meta);
      trace.line = { ...trace.line, color: own };
      trace.marker = { ...trace.marker, color: own };
      if (trace.fill) trace.fillcolor = own + "55";
    }
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
      layout[name] = {
        gridcolor: color("grid"), zerolinecolor: color("grid"), linecolor: color("line"), tickcolor: color("line"),
        ...layout[name],
      };
    }
    for (const shape of layout.shapes ?? []) shape.line = { color: color("dim"), width: 1, dash: "dot" };
    Object.assign(layout, {
      paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false,
      margin: { l: isNarrow ? 50 : 56, r: 10, t: 22, b: 40 },
      font: { color: color("dim"), size: 12, family: getComputedStyle(document.body).fontFamily },
      modebar: { bgcolor: "transparent", color: color("c8"), activecolor: color("text") },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") }, align: "left", namelength: -1 },
    });
    // What cannot be zoomed has no buttons for it.
    return Plotly.react(chart, data, layout, { ...config, displayModeBar: !layout.xaxis.fixedrange });
  }

  // A chart that is hidden has no width: it is drawn when it is shown.
  function drawIn(part) {
    for (const chart of part.querySelectorAll(".chart")) if (chart.clientWidth) draw(chart);
  }

  dark.addEventListener("change", () => drawIn(document));
  document.addEventListener("toggle", (event) => drawIn(event.target), true);
  drawIn(document);
})();
