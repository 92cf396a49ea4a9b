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

// InfluxConfig configures the push of metrics to InfluxDB.
type InfluxConfig struct {
	// URL is InfluxDB's write address: http://HOST:8086/write?db=NAME of 1.x,
	// http://HOST:8086/api/v2/write?org=ORG&bucket=BUCKET of 2.x. Without a path it is
	// that of 1.x, and without a name the database is "spillway". It may name the user of
	// Password (http://USER@HOST or u=USER), but no secret. Every user of the machine can
	// read a program's arguments.
	URL string
	// Password of the user that URL names, as 1.x wants it; "": none.
	Password string
	// Token is sent as 2.x wants it; "": none.
	Token    string
	Node     string // the tag "node" of every line
	Interval time.Duration
	// Buffer is the size in bytes of the buffer for lines that InfluxDB has not
	// accepted; the oldest are dropped first. 0: 4 MiB.
	Buffer   int
	Gatherer prometheus.Gatherer
	Log      *slog.Logger
}

const (
	defaultInfluxBuffer = 4 << 20
	// maxWrite bounds the bytes of one request, unless one reading is larger.
	maxWrite = 1 << 20
	// writeTimeout bounds one request.
	writeTimeout = 10 * time.Second
)

// pushed matches the metrics that are pushed: metrics about the node, not of the Go
// runtime.
var pushed = []string{"spillway_", "node_nf_conntrack_", "kubeproxy_"}

// withoutSecrets removes a possible password from a text that may not be a valid address.
func withoutSecrets(address string) string {
	if i := strings.IndexAny(address, "?#"); i >= 0 {
		address = address[:i]
	}
	if i := strings.LastIndexByte(address, '@'); i >= 0 {
		address = "..." + address[i:]
	}
	return address
}

// harmless lists the parameters of InfluxDB writes that are not secret. Others are
// rejected and not logged: a typo may give the password parameter p any name.
var harmless = []string{"db", "rp", "precision", "consistency", "org", "orgID", "bucket", "u"}

// writeURL completes URL, and takes the user out of it.
func (c InfluxConfig) writeURL() (address, user string, err error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return "", "", fmt.Errorf("%q: not an address: write http://HOST:8086/write?db=NAME", withoutSecrets(c.URL))
	}
	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "", "", fmt.Errorf("%q: the query is not valid: write db=NAME after the question mark", withoutSecrets(c.URL))
	}
	if _, set := u.User.Password(); set {
		return "", "", fmt.Errorf("%q: has a password, which every user of the machine can read: write it to a file and set "+
			"--influx-password-file", withoutSecrets(c.URL))
	}
	for _, name := range slices.Sorted(maps.Keys(q)) {
		if !slices.Contains(harmless, name) {
			return "", "", fmt.Errorf("%q: has a parameter other than %s: set a password with --influx-password-file and a token with "+
				"--influx-token-file",
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

// CheckInfluxURL validates an InfluxDB address, and reports whether it names a user. Its
// error quotes no secret.
func CheckInfluxURL(address string) (hasUser bool, err error) {
	_, user, err := InfluxConfig{URL: address}.writeURL()
	return user != "", err
}

// Validate reports a missing value or an invalid address.
func (c InfluxConfig) Validate() error {
	if _, _, err := c.writeURL(); err != nil {
		return err
	}
	if c.Interval <= 0 || c.Buffer < 0 || c.Gatherer == nil || c.Log == nil {
		return errors.New("InfluxDB: needs an interval, a gatherer and a log")
	}
	return nil
}

// Influx pushes metrics to an InfluxDB as line protocol, one measurement per metric. It
// buffers readings while InfluxDB cannot be reached.
type Influx struct {
	cfg     InfluxConfig
	url     string // without user and password, for the log
	user    string
	client  *http.Client
	waiting [][]byte // readings that are not delivered yet, oldest first
	bytes   int
	failing bool
	lost    int // readings dropped since the first failure

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
			Name: "spillway_influx_readings_total", Help: "Readings of all metrics by outcome: delivered, refused by InfluxDB, or dropped " +
				"because InfluxDB could not be reached for too long.",
		}, []string{"outcome"}),
		held: prometheus.NewGauge(prometheus.GaugeOpts{Name: "spillway_influx_waiting_bytes",
			Help: "Bytes of readings that InfluxDB has not accepted yet."}),
	}, nil
}

// Describe implements prometheus.Collector.
func (i *Influx) Describe(ch chan<- *prometheus.Desc) { i.readings.Describe(ch); i.held.Describe(ch) }

// Collect implements prometheus.Collector.
func (i *Influx) Collect(ch chan<- prometheus.Metric) { i.readings.Collect(ch); i.held.Collect(ch) }

// Run reads and pushes every Interval until ctx ends, and then returns nil. It logs when
// InfluxDB stops accepting readings and when it accepts them again.
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

// read appends one reading to the buffer, and drops the oldest if the buffer is full.
func (i *Influx) read(now time.Time) {
	families, err := i.cfg.Gatherer.Gather()
	if err != nil { // the other metrics are still valid
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

// drop removes the oldest readings.
func (i *Influx) drop(n int) {
	for _, lines := range i.waiting[:n] {
		i.bytes -= len(lines)
	}
	i.waiting = slices.Delete(i.waiting, 0, n)
	i.held.Set(float64(i.bytes))
}

// deliver sends the buffer, oldest first, until InfluxDB fails.
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
		if refused { // InfluxDB would refuse the lines again
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

// note logs when InfluxDB starts to fail and when it recovers.
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

// send posts lines. refused says that the lines are invalid, and InfluxDB works.
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
			err = u.Err // the log has the URL
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
		fmt.Errorf("InfluxDB returned %s: %s", r.Status, text)
}

// influxLines encodes metrics as line protocol: a measurement per metric, labels as tags,
// and the field "value". A histogram has "count", "sum" and a field per bucket, named by
// its upper bound.
func influxLines(families []*dto.MetricFamily, node string, at time.Time) []byte {
	var out []byte
	for _, f := range families {
		if !slices.ContainsFunc(pushed, func(p string) bool { return strings.HasPrefix(f.GetName(), p) }) {
			continue
		}
		for _, m := range f.GetMetric() {
			var e lineprotocol.Encoder // one per line, so that a failed line has no effect on the next
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

// influxTags returns the labels and the node, sorted, without empty tags, which InfluxDB
// does not allow.
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
