// Small pictures with a model's predictions.

import { ask, make, makeButton, openDialog } from "../page.js";
import { percent } from "../numbers.js";

/** Returns a picture with a caption, whose lines are `[text, CSS class]`. Small pictures are enlarged without smoothing. */
export function figure(png, alt, lines) {
  const image = make("img", { src: `data:image/png;base64,${png}`, alt, loading: "lazy", className: "picture" });
  return make("figure", {}, image, make("figcaption", {}, ...lines.map(([textContent, className = ""]) => make("span", { textContent, className }))));
}

/** Makes a figure's picture a button, which shows the picture larger, with the path of its file. */
function enlarge(figure, file) {
  const image = figure.querySelector("img"), { src, alt } = image;
  const show = () => openDialog("picture", alt, [make("img", { src, alt, className: "picture large" }), make("p", { textContent: `As the network sees it${file ? `; file ${file}` : ""}`, className: "small" })]);
  const button = makeButton("", show, { title: file ?? "", "aria-label": `Enlarge: ${alt}` });
  image.replaceWith(button);
  button.append(image);
}

/** Returns a figure for each entry of an evaluation (mistakes or right predictions), in order. */
export async function predictionFigures(job, entries, names) {
  const { samples } = await ask(`/api/v1/jobs/${job}/samples?indices=${entries.map((e) => e.index).join(",")}`);
  return samples.map((sample, i) => {
    const { label, predicted, confidence, index } = entries[i];
    const isWrong = label !== predicted;
    const sureness = percent(confidence, 0).replace(" ", "\u00a0");
    const alt = isWrong ? `picture ${index}: ${names[label]}, taken for ${names[predicted]}` : `picture ${index}: ${names[label]}`;
    const lines = [[isWrong ? `${names[predicted]} ${sureness}` : `${sureness} sure`, isWrong ? "bad" : ""], [isWrong ? `is ${names[label]}` : names[label], "muted"]];
    if (sample.file) lines.push([sample.file.split("/").pop(), "muted"]);
    const shown = figure(sample.png, alt, lines);
    enlarge(shown, sample.file);
    return shown;
  });
}
