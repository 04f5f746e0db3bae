"use strict";
// The layers on a job's page: the last profile of one of its ranks.

// How often the page looks for a newer profile, milliseconds: jobs profile a step in a hundred.
const PROFILES_EVERY = 10000;

class Profiles {
  constructor(job, ranks) {
    Object.assign(this, { job, ranks, place: element("section", { "aria-label": "Layers" }), shown: null, asked: -Infinity });
    this.chooser = layerChooser("Rank", () => { this.asked = -Infinity; this.shown = null; this.update(); });
    this.place.append(element("h2", {}, "Layers"), this.chooser.place);
  }

  end() { this.chooser.end(); }

  // Looks for a newer profile if it is time to.
  update() {
    if (performance.now() - this.asked < PROFILES_EVERY) return;
    this.asked = performance.now();
    this.load(this.chooser.offer(this.ranks().map((rank) => [String(rank), `rank ${rank}`])));
  }

  async load(rank) {
    if (rank === null) return;
    let profile;
    try {
      const answer = await request(`api/v1/jobs/${encodeURIComponent(this.job)}/layers?rank=${rank}`);
      profile = answer.profiles[0];
    } catch { return; /* The job has ended meanwhile: what was last known stays. */ }
    // Another one was chosen meanwhile.
    if (rank !== this.chooser.chosen()) return;
    const named = profile ? `${rank} ${profile.begin_unix_nano}` : `${rank} none`;
    if (named === this.shown) return;
    this.shown = named;
    if (!profile) {
      this.chooser.say(`Rank ${rank} has sent no profile of its layers. highwater.torch.watch sends one (docs/python.md).`);
      return;
    }
    // A record around others has what theirs have.
    const records = profile.records.filter((one) => one.modules === null).map((one) => [one.layer, one.direction, one.time_unix_nano, one.allocated, one.reserved, one.growth, one.activations,
      one.parameters, one.gathered, one.gathered_sum, one.duration_ns]);
    this.chooser.show({ title: `rank ${rank}${profile.step === null ? "" : `, step ${profile.step}`}`, records, missing: profile.missing, left_out: 0, totals: profile.totals });
  }
}
