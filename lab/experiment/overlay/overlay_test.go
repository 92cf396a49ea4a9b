package overlay

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"

	"spillway.dev/spillway/examples/rtb"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/fixture"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"

	"sigs.k8s.io/yaml"
)

func TestMain(m *testing.M) {
	workload.RunIfAsked()
	os.Exit(m.Run())
}

func TestRows(t *testing.T) {
	for _, quick := range []bool{true, false} {
		seen := map[string]bool{}
		for _, r := range rows(experiment.Options{Name: "x", Quick: quick}) {
			if seen[r.Name] || r.Takes <= 0 || strings.Contains(r.Name, "kube-proxy") != (r.Needs != nil) {
				t.Errorf("row %+v", r)
			}
			seen[r.Name] = true
		}
		if !seen["VXLAN: Spillway, eBPF"] || !seen["host-gw: kube-proxy, iptables"] || !seen["metal, or host networking"] {
			t.Errorf("rows are missing: %v", seen)
		}
	}
}

// An agent must accept the Service without a problem.
func TestServiceIsWhatAnAgentReads(t *testing.T) {
	_, delta := fixture.Manifests(t, "rtbtest", func(r *harness.Harness) (string, error) {
		text, err := r.Cluster.NodesYAML()
		for _, o := range []any{service(), slice(r.Cluster.Pod(1, 0))} {
			one, e := yaml.Marshal(o)
			if err == nil {
				err = e
			}
			text = append(append(text, "---\n"...), one...)
		}
		if err != nil {
			return "", err
		}
		_, err = r.WriteFile("manifests/rtb.yaml", text)
		return r.Path("manifests"), err
	})
	s := delta.Services[model.Name{Namespace: "rtb", Name: "exchange"}]
	if s == nil || len(s.Ports) != 1 || s.Ports[0].NodePort != nodePort || len(delta.Slices) != 1 {
		t.Errorf("read %+v", delta)
	}
}

// The exchange and its bidders as processes of pods find each other.
func TestBiddersRegister(t *testing.T) {
	if err := harness.CanRun(); err != nil {
		t.Skip(err)
	}
	spec := topology.DefaultSpec("rtbtwo")
	spec.Nodes, spec.PodsPerNode = 4, 2
	r, err := harness.Up(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Down(); err != nil {
			t.Error(err)
		}
	}()
	c := r.Cluster
	if err := r.Serve(context.Background(), c.Pod(1, 0), workload.Exchange, podPort); err != nil {
		t.Fatal(err)
	}
	if err := startDSPs(context.Background(), r, &proxies[0]); err != nil {
		t.Fatal(err)
	}
	client := http.Client{Transport: &http.Transport{DialContext: c.Pod(0, 0).Dial, DisableKeepAlives: true}}
	resp, err := client.Post("http://"+netip.AddrPortFrom(c.Pod(1, 0).IPv4, podPort).String()+"/bid", "application/json",
		bytes.NewReader(rtb.Sample()))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(body), `"price":0.5`) {
		t.Errorf("the exchange says %s %s (%v), want the bid of a bidder", resp.Status, body, err)
	}
}
