package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/limitlistener"
)

// HealthChecks serves the healthCheckNodePorts of Services: 200 if the Service has ready
// endpoints on this node and the proxy is healthy, else 503. Update and Close belong to
// one goroutine.
type HealthChecks struct {
	anyAddr bool
	healthy func() bool
	log     *slog.Logger
	addrs   []netip.Addr
	checks  map[model.Name]*check
	limiter *limitlistener.Limiter // of all Services together
}

// check is the server of one Service.
type check struct {
	service   model.Name
	port      uint16
	endpoints atomic.Int64
	server    *http.Server
	listeners map[netip.Addr]net.Listener
}

// NewHealthChecks returns a server without Services. With anyAddr it listens on the
// wildcard address, as kube-proxy does when --nodeport-addresses is unset; else on each
// address that Update names. healthy reports on the proxy itself.
func NewHealthChecks(anyAddr bool, healthy func() bool, log *slog.Logger) *HealthChecks {
	return &HealthChecks{
		anyAddr: anyAddr,
		healthy: healthy,
		log:     log,
		checks:  map[model.Name]*check{},
		limiter: limitlistener.New(limits),
	}
}

// Update applies the changes, moves to the given addresses, and retries to listen where it
// failed before. It returns the current problems, nil if there are none.
func (h *HealthChecks) Update(addrs []netip.Addr, changed []intent.HealthCheck) []model.Problem {
	if h.anyAddr {
		addrs = []netip.Addr{{}} // ":port" is both families
	}
	if !slices.Equal(h.addrs, addrs) {
		h.addrs = slices.Clone(addrs)
		for _, c := range h.checks {
			c.leave(h.addrs)
		}
	}
	// Close before opening: a port may move from one Service to another.
	for _, hc := range changed {
		if c := h.checks[hc.Service]; c != nil && c.port != hc.Port {
			c.close()
			delete(h.checks, hc.Service)
		}
	}
	for _, hc := range changed {
		if hc.Port == 0 {
			continue
		}
		c := h.checks[hc.Service]
		if c == nil {
			c = h.newCheck(hc)
			h.checks[hc.Service] = c
		}
		c.endpoints.Store(int64(hc.Endpoints))
	}
	return h.listenAll()
}

// Close stops all servers.
func (h *HealthChecks) Close() {
	for _, c := range h.checks {
		c.close()
	}
	clear(h.checks)
}

// listenAll opens missing listeners. The order is fixed: of two Services with one port,
// the same one always gets it.
func (h *HealthChecks) listenAll() []model.Problem {
	var ps []model.Problem
	for _, name := range slices.SortedFunc(maps.Keys(h.checks), model.Name.Compare) {
		c := h.checks[name]
		for _, a := range h.addrs {
			if err := c.open(a, h.limiter, h.log); err != nil {
				ps = append(ps, c.problem(err))
			}
		}
	}
	return ps
}

func (h *HealthChecks) newCheck(hc intent.HealthCheck) *check {
	c := &check{
		service:   hc.Service,
		port:      hc.Port,
		listeners: map[netip.Addr]net.Listener{},
	}
	c.server = newHTTPServer(h.handler(c), h.log)
	return c
}

// handler answers with kube-proxy's body and header.
func (h *HealthChecks) handler(c *check) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n, healthy := c.endpoints.Load(), h.healthy()
		code := http.StatusServiceUnavailable
		if n > 0 && healthy {
			code = http.StatusOK
		}
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.FormatInt(n, 10))
		jsonHeader(w, code)
		fmt.Fprintf(w, `{
	"service": {
		"namespace": %q,
		"name": %q
	},
	"localEndpoints": %d,
	"serviceProxyHealthy": %v
}`, c.service.Namespace, c.service.Name, n, healthy)
	})
}

// open listens on one address unless it does already.
func (c *check) open(a netip.Addr, limiter *limitlistener.Limiter, log *slog.Logger) error {
	if c.listeners[a] != nil {
		return nil
	}
	host := ""
	if a.IsValid() {
		host = a.String()
	}
	l, err := listen(context.Background(), net.JoinHostPort(host, strconv.Itoa(int(c.port))))
	if err != nil {
		return err
	}
	c.listeners[a] = l
	go func() {
		err := c.server.Serve(limiter.Listener(l))
		if !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			log.Error("health check ended", "service", c.service.String(), "err", err)
		}
	}()
	return nil
}

// leave stops listening on addresses that are not in addrs.
func (c *check) leave(addrs []netip.Addr) {
	for a, l := range c.listeners {
		if !slices.Contains(addrs, a) {
			l.Close()
			delete(c.listeners, a)
		}
	}
}

// close stops serving. It closes the listeners itself, since the server may not know them
// yet: the port must be free when close returns.
func (c *check) close() {
	for _, l := range c.listeners {
		l.Close()
	}
	clear(c.listeners)
	c.server.Close()
}

func (c *check) problem(err error) model.Problem {
	return model.ServiceProblem(c.service, "spec.healthCheckNodePort",
		fmt.Sprintf("%v; load balancers see this node as down until the port is free", err))
}
