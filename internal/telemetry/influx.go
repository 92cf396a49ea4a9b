package telemetry

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/influxdata/line-protocol/v2/lineprotocol"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// InfluxConfig says where metrics are pushed.
type InfluxConfig struct {
	// URL is InfluxDB's write address: http://HOST:8086/write?db=NAME of 1.x,
	// http://HOST:8086/api/v2/write?org=ORG&bucket=BUCKET of 2.x. Without a path
	// it is that of 1.x, and without a name the database is "spillway". It may name
	// the user of Password (http://USER@HOST or u=USER), and no secret: every user of
	// the machine can read a program's arguments.
	URL string
	// Password of the user that URL names, as 1.x wants it; "": none.
	Password string
	// Token is sent as 2.x wants it; "": none.
	Token    string
	Node     string // the tag "node" of every line
	Interval time.Duration
	// Buffer is how many bytes of lines wait for an InfluxDB that is away; the
	// oldest go first. 0: 4 MiB.
	Buffer   int
	Gatherer prometheus.Gatherer
	Log      *slog.Logger
}

const (
	defaultInfluxBuffer = 4 << 20
	// maxWrite is the most that one request carries, unless one reading is more.
	maxWrite = 1 << 20
	// writeTimeout bounds one request.
	writeTimeout = 10 * time.Second
)

// pushed are the metrics that go to InfluxDB: those about the node, and not those
// of the Go runtime.
var pushed = []string{"spillway_", "node_nf_conntrack_", "kubeproxy_"}

// withoutSecrets cuts out of an address that need not be one what may be a password.
func withoutSecrets(address string) string {
	if i := strings.IndexAny(address, "?#"); i >= 0 {
		address = address[:i]
	}
	if i := strings.LastIndexByte(address, '@'); i >= 0 {
		address = "..." + address[i:]
	}
	return address
}

// harmless are the parameters of writes to InfluxDB that are no secret. Others are
// neither logged nor taken: a slip of the pen may make any name of p.
var harmless = []string{"db", "rp", "precision", "consistency", "org", "orgID", "bucket", "u"}

// writeURL completes URL, and takes the user out of it.
func (c InfluxConfig) writeURL() (address, user string, err error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return "", "", fmt.Errorf("%q: not an address: write http://HOST:8086/write?db=NAME", withoutSecrets(c.URL))
	}
	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "", "", fmt.Errorf("%q: what stands behind the question mark cannot be read: write db=NAME", withoutSecrets(c.URL))
	}
	if _, set := u.User.Password(); set {
		return "", "", fmt.Errorf("%q: has a password, which every user of the machine could read: write it to a file and give --influx-password-file", withoutSecrets(c.URL))
	}
	for _, name := range slices.Sorted(maps.Keys(q)) {
		if !slices.Contains(harmless, name) {
			return "", "", fmt.Errorf("%q: has a parameter beside %s: give a password by --influx-password-file and a token by --influx-token-file",
				withoutSecrets(c.URL), strings.Join(harmless, ", "))
		}
	}
	user = cmp.Or(u.User.Username(), q.Get("u"))
	u.User, u.Fragment, u.RawFragment = nil, "", ""
	q.Del("u")
	if u.Path == "" || u.Path == "/" {
		u.Path = "/write"
	}
	if u.Path == "/write" && q.Get("db") == "" {
		q.Set("db", "spillway")
	}
	q.Set("precision", "ns")
	u.RawQuery = q.Encode()
	return u.String(), user, nil
}

// CheckInfluxURL says whether an address could be an InfluxDB's, and whether it names a
// user. Its error quotes no secret.
func CheckInfluxURL(address string) (hasUser bool, err error) {
	_, user, err := InfluxConfig{URL: address}.writeURL()
	return user != "", err
}

// Validate says what is missing or not an address.
func (c InfluxConfig) Validate() error {
	if _, _, err := c.writeURL(); err != nil {
		return err
	}
	if c.Interval <= 0 || c.Buffer < 0 || c.Gatherer == nil || c.Log == nil {
		return errors.New("InfluxDB: needs an interval, a gatherer and a log")
	}
	return nil
}

// Influx pushes metrics to an InfluxDB as line protocol, one measurement a
// metric. While InfluxDB is away it keeps what fits into its buffer.
type Influx struct {
	cfg     InfluxConfig
	url     string // without user and password, and so fit for a log
	user    string
	client  *http.Client
	waiting [][]byte // readings that are not delivered yet, oldest first
	bytes   int
	failing bool
	lost    int // readings given up since it began to fail

	readings *prometheus.CounterVec
	held     prometheus.Gauge
}

// NewInflux prepares an Influx; Run starts it.
func NewInflux(c InfluxConfig) (*Influx, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c.Buffer = cmp.Or(c.Buffer, defaultInfluxBuffer)
	address, user, err := c.writeURL()
	if err != nil {
		return nil, err
	}
	return &Influx{
		cfg: c, url: address, user: user, client: &http.Client{Timeout: writeTimeout},
		readings: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "spillway_influx_readings_total", Help: "Readings of all metrics by what became of them: delivered, refused by InfluxDB, or given up because it was away too long.",
		}, []string{"outcome"}),
		held: prometheus.NewGauge(prometheus.GaugeOpts{Name: "spillway_influx_waiting_bytes", Help: "Bytes of readings that InfluxDB has not taken yet."}),
	}, nil
}

// Describe implements prometheus.Collector.
func (i *Influx) Describe(ch chan<- *prometheus.Desc) { i.readings.Describe(ch); i.held.Describe(ch) }

// Collect implements prometheus.Collector.
func (i *Influx) Collect(ch chan<- prometheus.Metric) { i.readings.Collect(ch); i.held.Collect(ch) }

// Run reads and pushes every Interval until ctx ends, and returns nil then. An
// InfluxDB that is away is told in the log when it goes and when it comes back.
func (i *Influx) Run(ctx context.Context) error {
	tick := time.NewTicker(i.cfg.Interval)
	defer tick.Stop()
	for {
		i.read(time.Now())
		i.deliver(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// read puts one reading behind those that wait, and gives up the oldest if they
// are too many.
func (i *Influx) read(now time.Time) {
	families, err := i.cfg.Gatherer.Gather()
	if err != nil { // the others are there all the same
		i.cfg.Log.Debug("Read metrics", "err", err)
	}
	lines := influxLines(families, i.cfg.Node, now)
	i.waiting, i.bytes = append(i.waiting, lines), i.bytes+len(lines)
	for i.bytes > i.cfg.Buffer && len(i.waiting) > 0 {
		i.drop(1)
		i.lost++
		i.readings.WithLabelValues("given_up").Inc()
	}
	i.held.Set(float64(i.bytes))
}

// drop takes the oldest readings out.
func (i *Influx) drop(n int) {
	for _, lines := range i.waiting[:n] {
		i.bytes -= len(lines)
	}
	i.waiting = slices.Delete(i.waiting, 0, n)
	i.held.Set(float64(i.bytes))
}

// deliver sends what waits, oldest first, until InfluxDB fails.
func (i *Influx) deliver(ctx context.Context) {
	for len(i.waiting) > 0 && ctx.Err() == nil {
		n, size := 1, len(i.waiting[0])
		for n < len(i.waiting) && size+len(i.waiting[n]) <= maxWrite {
			size += len(i.waiting[n])
			n++
		}
		refused, err := i.send(ctx, slices.Concat(i.waiting[:n]...))
		if ctx.Err() != nil {
			return
		}
		if err != nil && !refused {
			i.note(err)
			return
		}
		outcome := "delivered"
		if refused { // it would refuse them the next time too
			outcome = "refused"
			i.note(err)
		}
		i.readings.WithLabelValues(outcome).Add(float64(n))
		i.drop(n)
		if err == nil {
			i.note(nil)
		}
	}
}

// note logs when InfluxDB begins to fail and when it is well again.
func (i *Influx) note(err error) {
	switch {
	case err != nil && !i.failing:
		i.cfg.Log.Warn("InfluxDB does not take metrics; they are kept for a while and tried again", "url", i.url, "err", err)
	case err != nil:
		i.cfg.Log.Debug("InfluxDB does not take metrics", "url", i.url, "err", err)
	case i.failing:
		i.cfg.Log.Info("InfluxDB takes metrics again", "url", i.url, "readingsLost", i.lost)
		i.lost = 0
	}
	i.failing = err != nil
}

// send posts lines. refused says that these lines are at fault, not InfluxDB.
func (i *Influx) send(ctx context.Context, lines []byte) (refused bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, i.url, bytes.NewReader(lines))
	if err != nil {
		return false, err
	}
	req.Header.Set("Content-Type", "text/plain; charset=utf-8")
	if i.user != "" {
		req.SetBasicAuth(i.user, i.cfg.Password)
	}
	if i.cfg.Token != "" {
		req.Header.Set("Authorization", "Token "+i.cfg.Token)
	}
	r, err := i.client.Do(req)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err // the URL stands beside it
		}
		return false, err
	}
	defer r.Body.Close()
	answer, _ := io.ReadAll(io.LimitReader(r.Body, 1024))
	if r.StatusCode/100 == 2 {
		return false, nil
	}
	text, _, _ := strings.Cut(strings.TrimSpace(string(answer)), "\n")
	return r.StatusCode == http.StatusBadRequest || r.StatusCode == http.StatusRequestEntityTooLarge,
		fmt.Errorf("it answers %s: %s", r.Status, text)
}

// influxLines writes metrics as line protocol: a measurement for each metric,
// labels as tags; the field "value", or of a histogram "count", "sum" and one for
// each bucket, named by its upper bound.
func influxLines(families []*dto.MetricFamily, node string, at time.Time) []byte {
	var out []byte
	for _, f := range families {
		if !slices.ContainsFunc(pushed, func(p string) bool { return strings.HasPrefix(f.GetName(), p) }) {
			continue
		}
		for _, m := range f.GetMetric() {
			var e lineprotocol.Encoder // a line that failed leaves nothing to the next one
			e.StartLine(f.GetName())
			for _, tag := range influxTags(m, node) {
				e.AddTag(tag[0], tag[1])
			}
			if addInfluxFields(&e, m); e.Err() != nil {
				continue
			}
			if e.EndLine(at); e.Err() == nil {
				out = append(out, e.Bytes()...)
			}
		}
	}
	return out
}

// influxTags are the labels and the node, in order; InfluxDB has no empty tags.
func influxTags(m *dto.Metric, node string) (tags [][2]string) {
	if node != "" {
		tags = append(tags, [2]string{"node", node})
	}
	for _, l := range m.GetLabel() {
		if l.GetValue() != "" {
			tags = append(tags, [2]string{l.GetName(), l.GetValue()})
		}
	}
	slices.SortFunc(tags, func(a, b [2]string) int { return cmp.Compare(a[0], b[0]) })
	return slices.CompactFunc(tags, func(a, b [2]string) bool { return a[0] == b[0] })
}

// addInfluxFields adds a metric's values; there is no line for NaN.
func addInfluxFields(e *lineprotocol.Encoder, m *dto.Metric) {
	add := func(name string, v float64) {
		if value, ok := lineprotocol.FloatValue(v); ok {
			e.AddField(name, value)
		}
	}
	switch {
	case m.Counter != nil:
		add("value", m.Counter.GetValue())
	case m.Gauge != nil:
		add("value", m.Gauge.GetValue())
	case m.Untyped != nil:
		add("value", m.Untyped.GetValue())
	case m.Histogram != nil:
		add("count", float64(m.Histogram.GetSampleCount()))
		add("sum", m.Histogram.GetSampleSum())
		for _, b := range m.Histogram.GetBucket() {
			add(strconv.FormatFloat(b.GetUpperBound(), 'g', -1, 64), float64(b.GetCumulativeCount()))
		}
	}
}
