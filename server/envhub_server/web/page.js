// Asks for the next frame when the last one is on the screen: none is drawn for a hidden tab or a closed page.
async function watchFrames(image, note, url) {
  image.dataset.url = url; note.textContent = "";
  while (image.isConnected && image.dataset.url === url && url) {
    await new Promise(requestAnimationFrame);
    const began = performance.now(), answer = await fetch(url, {cache: "no-store"});
    if (!answer.ok) { note.textContent = await answer.text(); break; }
    const before = image.src; image.src = URL.createObjectURL(await answer.blob());
    if (before) URL.revokeObjectURL(before);
    await new Promise(next => setTimeout(next, Math.max(0, 100 - (performance.now() - began))));
  }
}
