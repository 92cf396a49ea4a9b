package change

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/listwatch"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
)

const (
	crowd = "crowd" // namespace of the many
	// peerChanges is the maximum number of changes for kube-proxy: each takes a second or
	// more in a large cluster.
	peerChanges  = 15
	syncPatience = 5 * time.Minute
)

// peer is a side that kube-proxy writes to. It lists and watches the objects on another
// machine of the cluster. The durations of its syncs come from its own metrics.
type peer struct {
	harness *harness.Harness
	api     *listwatch.Server
	crowd   controlplane.Crowd
	cmd     *topology.Cmd
	log     strings.Builder
	first   Cold
	todo    int // changes to make
}

func newPeer(ctx context.Context, cfg Config, r *harness.Harness, mode, variant string, services int) (*peer, error) {
	p := &peer{harness: r, todo: min(cfg.Changes, peerChanges)}
	if err := p.start(ctx, mode, variant, services); err != nil {
		return nil, errors.Join(err, p.down())
	}
	return p, nil
}

func (p *peer) start(ctx context.Context, mode, variant string, services int) error {
	program, err := controlplane.Program("kube-proxy")
	if err != nil {
		return err
	}
	node := p.harness.Cluster.Node(0)
	p.crowd = controlplane.Crowd{Namespace: crowd, Services: services, Endpoints: Endpoints, First: address(10, 1),
		ClusterIP: address(10, 97<<16+1)}
	objects := append(p.crowd.Objects(), probeObjects(node.Name, p.harness.Cluster.Pod(0, 0).IPv4)...)
	if p.api, err = p.harness.API(ctx, p.harness.Cluster.Client(1), objects...); err != nil {
		return err
	}
	memory, err := kernelMemory()
	if err != nil {
		return err
	}
	// No setting of the whole machine is changed.
	p.cmd = node.Command(ctx, program, "--proxy-mode", mode, "--kubeconfig", p.harness.Kubeconfig(),
		"--hostname-override", node.Name, "--cluster-cidr", "10.0.0.0/8", "--iptables-min-sync-period", "0",
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
		"--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0")
	if variant != "" {
		path, err := p.harness.IptablesPath(variant)
		if err != nil {
			return err
		}
		p.cmd.Env = append(p.cmd.Environ(), "PATH="+path)
	}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.WaitDelay = time.Second
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	if p.first.Seconds, err = p.synced(ctx, 0, 0); err != nil {
		return err
	}
	if p.first.KernelMiB, err = kernelMemory(); err != nil {
		return err
	}
	p.first.KernelMiB -= memory
	if p.first.CPU, err = p.cpu(); err != nil {
		return err
	}
	p.first.RSS, err = p.memory()
	return err
}

// probeObjects are the probe of world.
func probeObjects(node string, pod netip.Addr) []runtime.Object {
	meta := metav1.ObjectMeta{Name: probe.Name, Namespace: probe.Namespace,
		Labels: map[string]string{discoveryv1.LabelServiceName: probe.Name}}
	const clusterIP = "10.96.0.10"
	return []runtime.Object{
		&corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: ProbeNodePort}},
		}},
		&discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
			Ports:     []discoveryv1.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](ProbePort)}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{pod.String()}, NodeName: &node}},
		},
	}
}

func (p *peer) cold() Cold             { return p.first }
func (p *peer) host() *harness.Harness { return p.harness }

// change makes one endpoint of a Service after the other not ready, and reads the
// duration of kube-proxy's sync each time.
func (p *peer) change(ctx context.Context) (b Batch, err error) {
	cpu, err := p.cpu()
	if err != nil {
		return b, err
	}
	n := min(p.todo, p.crowd.Services)
	for i := range n {
		sum, count, err := p.syncs(ctx)
		if err != nil {
			return b, err
		}
		slice := p.crowd.Slice(i)
		slice.Endpoints[0].Conditions.Ready = ptr.To(false)
		if err := p.api.Apply(slice); err != nil {
			return b, err
		}
		took, err := p.synced(ctx, sum, count)
		if err != nil {
			return b, err
		}
		b.Millis = append(b.Millis, took*1e3)
	}
	after, err := p.cpu()
	if err != nil {
		return b, err
	}
	b.CPU = (after - cpu) * 1e3 / float64(n)
	b.RSS, err = p.memory()
	return b, err
}

// synced waits until syncs end, and returns their duration in seconds.
func (p *peer) synced(ctx context.Context, before, after float64) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, syncPatience)
	defer cancel()
	for last := -1.0; ; {
		sum, count, err := p.syncs(ctx)
		if err == nil && count > after && count == last {
			return sum - before, nil
		}
		if err == nil {
			last = count
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("wait for kube-proxy to sync: %w: %s", errors.Join(ctx.Err(), err), lastLine(p.log.String()))
		case <-time.After(300 * time.Millisecond):
		}
	}
}

var syncMetric = regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_duration_seconds_(sum|count)(?:\{ip_family="IPv4"\})? (\S+)$`)

// syncs counts kube-proxy's syncs of IPv4: their seconds, their number.
func (p *peer) syncs(ctx context.Context) (sum, count float64, err error) {
	client := http.Client{Timeout: 10 * time.Second,
		Transport: &http.Transport{DialContext: p.harness.Cluster.Node(0).Dial, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10249/metrics", nil)
	if err != nil {
		return 0, 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, 0, err
	}
	for _, m := range syncMetric.FindAllStringSubmatch(string(text), -1) {
		v, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return 0, 0, fmt.Errorf("read kube-proxy's metrics: %w", err)
		}
		if m[1] == "sum" {
			sum += v
		} else {
			count += v
		}
	}
	return sum, count, nil
}

func (p *peer) memory() (float64, error) {
	kib, err := procFields(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid), "VmRSS")
	return kib / 1024, err
}

// cpu is the time, in seconds, that kube-proxy and its ended children have used (proc(5):
// utime, stime, cutime, cstime in hundredths of a second).
func (p *peer) cpu() (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	total := 0.0
	for _, f := range fields[11:15] {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return 0, fmt.Errorf("read CPU time of kube-proxy: %w", err)
		}
		total += n / 100
	}
	return total, nil
}

func (p *peer) down() error {
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		done := time.AfterFunc(3*time.Second, func() { _ = p.cmd.Process.Kill() })
		_ = p.cmd.Wait()
		done.Stop()
	}
	return p.harness.Down()
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndexByte(text, '\n')+1:]
}
