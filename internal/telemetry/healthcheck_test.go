package telemetry

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

var (
	lo1 = netip.MustParseAddr("127.0.0.1")
	lo2 = netip.MustParseAddr("127.0.0.2")
	web = model.Name{Namespace: "default", Name: "web"}
	dns = model.Name{Namespace: "default", Name: "dns"}
)

// freePort returns a port without a listener.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

func newChecks(t *testing.T, anyAddr bool) (*HealthChecks, *atomic.Bool) {
	var healthy atomic.Bool
	healthy.Store(true)
	h := NewHealthChecks(anyAddr, healthy.Load, quiet)
	t.Cleanup(h.Close)
	return h, &healthy
}

func address(a netip.Addr, port uint16) string {
	return fmt.Sprintf("http://%s/", netip.AddrPortFrom(a, port))
}

func refused(a netip.Addr, port uint16) bool {
	c, err := net.Dial("tcp", netip.AddrPortFrom(a, port).String())
	if err == nil {
		c.Close()
	}
	return err != nil
}

func TestHealthCheckAnswersAsKubeProxyDoes(t *testing.T) {
	h, healthy := newChecks(t, false)
	port := freePort(t)
	for _, c := range []struct {
		endpoints int
		healthy   bool
		code      int
	}{{2, true, 200}, {0, true, 503}, {1, false, 503}, {1, true, 200}} {
		healthy.Store(c.healthy)
		if ps := h.Update([]netip.Addr{lo1}, []intent.HealthCheck{{Service: web, Port: port, Endpoints: c.endpoints}}); ps != nil {
			t.Fatal(ps)
		}
		code, header, body := get(t, address(lo1, port))
		if code != c.code || header.Get("X-Load-Balancing-Endpoint-Weight") != fmt.Sprint(c.endpoints) {
			t.Errorf("%+v: code %d, header %v", c, code, header)
		}
		var got struct {
			Service             struct{ Namespace, Name string }
			LocalEndpoints      int
			ServiceProxyHealthy bool
		}
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			t.Fatal(err, body)
		}
		if got.Service.Namespace != "default" || got.Service.Name != "web" || got.LocalEndpoints != c.endpoints ||
			got.ServiceProxyHealthy != c.healthy {
			t.Errorf("%+v: %s", c, body)
		}
	}
}

func TestHealthCheckMovesAndCloses(t *testing.T) {
	h, _ := newChecks(t, false)
	first, second := freePort(t), freePort(t)
	check := func(port uint16) []intent.HealthCheck {
		return []intent.HealthCheck{{Service: web, Port: port, Endpoints: 1}}
	}
	h.Update([]netip.Addr{lo1}, check(first))
	if code, _, _ := get(t, address(lo1, first)); code != 200 {
		t.Error(code)
	}
	if !refused(lo2, first) {
		t.Error("listens on an address that serves no NodePorts")
	}
	h.Update([]netip.Addr{lo1}, check(second))
	if code, _, _ := get(t, address(lo1, second)); code != 200 || !refused(lo1, first) {
		t.Error("the port did not move")
	}
	h.Update([]netip.Addr{lo2}, nil)
	if code, _, _ := get(t, address(lo2, second)); code != 200 || !refused(lo1, second) {
		t.Error("the address did not move")
	}
	h.Update([]netip.Addr{lo2}, check(0))
	if !refused(lo2, second) {
		t.Error("the port did not close")
	}
}

func TestAPortGoesFromOneServiceToAnotherInOneUpdate(t *testing.T) {
	h, _ := newChecks(t, false)
	port := freePort(t)
	h.Update([]netip.Addr{lo1}, []intent.HealthCheck{{Service: web, Port: port, Endpoints: 1}})
	ps := h.Update([]netip.Addr{lo1}, []intent.HealthCheck{{Service: dns, Port: port, Endpoints: 1}, {Service: web}})
	if ps != nil {
		t.Fatal(ps)
	}
	if _, _, body := get(t, address(lo1, port)); !strings.Contains(body, `"name": "dns"`) {
		t.Error(body)
	}
}

func TestAPortInUseIsAProblemAndTriedAgain(t *testing.T) {
	h, _ := newChecks(t, false)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	ps := h.Update([]netip.Addr{lo1}, []intent.HealthCheck{{Service: web, Port: port, Endpoints: 1}})
	if len(ps) != 1 || !strings.Contains(ps[0].String(), "Service default/web: spec.healthCheckNodePort: listen on 127.0.0.1:") {
		t.Fatal(ps)
	}
	l.Close()
	if ps := h.Update([]netip.Addr{lo1}, nil); ps != nil {
		t.Fatal(ps)
	}
	if code, _, _ := get(t, address(lo1, port)); code != 200 {
		t.Error(code)
	}
}

func TestAnyAddressListensOnAll(t *testing.T) {
	h, _ := newChecks(t, true)
	port := freePort(t)
	if ps := h.Update(nil, []intent.HealthCheck{{Service: web, Port: port, Endpoints: 1}}); ps != nil {
		t.Fatal(ps)
	}
	for _, a := range []netip.Addr{lo1, lo2} {
		if code, _, _ := get(t, address(a, port)); code != 200 {
			t.Error(a, code)
		}
	}
}
