// Dark, light, or as the system says; and the colours of the style sheet for canvases.
// Knows nothing of what is drawn.

const ORDER = ["auto", "dark", "light"];
const SIGNS = { auto: "◐", dark: "●", light: "○" };
const KEY = "ropeway-theme";

/** The button cycles through the themes; onChange is called after each change, the system's included. */
export function setUpTheme(button, onChange) {
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `${SIGNS[theme]} ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}. Press to change.`);
  };
  let theme = ORDER.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    localStorage.setItem(KEY, theme);
    show(theme);
    onChange();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
}

const probe = document.createElement("span");
probe.hidden = true;

/** The colour that the style sheet's variable has now. */
export function colour(variable) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${variable})`;
  return getComputedStyle(probe).color;
}

/** Sizes a canvas to its box in device pixels; true if that changed it. Its context draws in CSS pixels. */
export function fitCanvas(canvas, context, width, height) {
  const ratio = devicePixelRatio;
  const pixelWidth = Math.round(width * ratio);
  const pixelHeight = Math.round(height * ratio);
  if (canvas.width === pixelWidth && canvas.height === pixelHeight) return false;
  canvas.width = pixelWidth;
  canvas.height = pixelHeight;
  canvas.style.height = `${height}px`;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return true;
}
