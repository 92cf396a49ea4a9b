package experiment

// Side is what a row stands for in charts.
type Side string

// The sides. Everything that is neither is kube-proxy, or the kernel alone.
const (
	Other    Side = ""
	Metal    Side = "metal"    // without what is measured: the most that the machine can do
	Spillway Side = "spillway" // with what Spillway does
)

// Card is the short answer of an experiment: what a report shows first.
type Card struct {
	// Question is one sentence.
	Question string `json:"question"`
	// Number is Spillway's figure, and Unit says of what.
	Number string `json:"number"`
	Unit   string `json:"unit"`
	// Verdict is one line for a terminal, Spillway's figures first. It has VerdictWidth
	// characters at most.
	Verdict string `json:"verdict"`
	// Claim continues a sentence that begins with "Spillway". It is set where the run has
	// figures of kube-proxy too.
	Claim string `json:"claim,omitempty"`
	// Published is the published result in a few words. Other machines made it, so it
	// stands apart from Bars.
	Published string `json:"published"`
	// Caption says what Bars show.
	Caption string    `json:"caption"`
	Bars    []CardBar `json:"bars"`
}

// VerdictWidth is the room of a verdict behind an experiment's name in 80 columns.
const VerdictWidth = 66

// CardBar is one bar of a card's chart.
type CardBar struct {
	Name  string  `json:"name"`
	Side  Side    `json:"side,omitempty"`
	Value Summary `json:"value"`
}

// Add adds the figure of a row as a bar, and returns its median. Without a figure it
// adds nothing and ok is false.
func (c *Card) Add(res *Result, row, key, name string) (median float64, ok bool) {
	r := res.Row(row)
	if r == nil {
		return 0, false
	}
	v, ok := r.Value(key)
	if ok {
		c.Bars = append(c.Bars, CardBar{Name: name, Side: r.Side, Value: v})
	}
	return v.Median, ok
}
