// A served page asks for its version every two seconds and updates what has changed; the user's choices are kept.
const PARTS = ["header", "figures", "evaluation", "memory-tables", "config", "environment"];
let version = data.live;

async function refresh() {
  const status = byId("live");
  try {
    const answer = await fetch("version", { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    const newest = await answer.text();
    if (newest !== version) {
      const page = new DOMParser().parseFromString(await (await fetch("./", { cache: "no-store" })).text(), "text/html");
      for (const id of PARTS) if (byId(id).innerHTML !== page.getElementById(id).innerHTML) byId(id).innerHTML = page.getElementById(id).innerHTML;
      data = JSON.parse(page.getElementById("data").textContent);
      version = data.live;
      drawAll();
      fillChoices();
      await buildViewer();
    }
    if (byId("live")) { byId("live").textContent = "live"; byId("live").classList.remove("lost"); }
  } catch (error) {
    if (status) { status.textContent = "not reachable; start scripts/report.py --serve again"; status.classList.add("lost"); }
  }
  setTimeout(refresh, 2000);
}

if (data.live) setTimeout(refresh, 2000);
