package harness

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
)

// Counters reads what conntrack has counted on a host.
func (h *Harness) Counters(ctx context.Context, host *topology.Host) (c conntrack.Counters, err error) {
	err = host.Do(func() error {
		conn, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer conn.Close()
		c, err = conn.Stats(ctx)
		return err
	})
	if err != nil {
		return c, fmt.Errorf("read conntrack counters of %s: %w", host.Name, err)
	}
	return c, nil
}

// LoadFrom runs the same load from several hosts at once, which share its
// connections and its rate, and adds the results up.
func (h *Harness) LoadFrom(ctx context.Context, hosts []*topology.Host, cfg load.Config) (*load.Result, error) {
	results, errs := make([]*load.Result, len(hosts)), make([]error, len(hosts))
	var wg sync.WaitGroup
	for i, host := range hosts {
		one := cfg
		one.Connections = cfg.Connections / len(hosts)
		if i < cfg.Connections%len(hosts) {
			one.Connections++
		}
		one.Rate = cfg.Rate / float64(len(hosts))
		if one.Connections == 0 {
			continue
		}
		wg.Go(func() { results[i], errs[i] = h.Load(ctx, host, one) })
	}
	wg.Wait()
	var ran []*load.Result
	for i := range hosts {
		if errs[i] != nil {
			return nil, errs[i]
		}
		if results[i] != nil {
			ran = append(ran, results[i])
		}
	}
	return load.Merge(ran)
}

// Logs returns the last lines of what agents and other peers have printed.
func (h *Harness) Logs() string {
	var b strings.Builder
	for _, p := range h.agents {
		if text := p.log.lastLines(15); text != "" {
			fmt.Fprintf(&b, "%s:\n%s\n", p.name, text)
		}
	}
	return b.String()
}

// TCPCounters are what a host's TCP has counted.
type TCPCounters struct {
	RepeatedSYNs uint64 // SYNs and SYN-ACKs that it sent again
	Opened       uint64 // connections that it began
	Resets       uint64 // RSTs that it sent
}

// Add adds the counters of another host.
func (c *TCPCounters) Add(o TCPCounters) {
	c.RepeatedSYNs, c.Opened, c.Resets = c.RepeatedSYNs+o.RepeatedSYNs, c.Opened+o.Opened, c.Resets+o.Resets
}

// Minus returns what was counted since earlier.
func (c TCPCounters) Minus(earlier TCPCounters) TCPCounters {
	return TCPCounters{c.RepeatedSYNs - earlier.RepeatedSYNs, c.Opened - earlier.Opened, c.Resets - earlier.Resets}
}

// ReadTCP reads the counters of a host.
func ReadTCP(host *topology.Host) (c TCPCounters, err error) {
	err = host.Do(func() error {
		for _, f := range []struct {
			file, group, name string
			to                *uint64
		}{
			// Under /proc/net would be the namespace of the process's first thread.
			{"/proc/thread-self/net/netstat", "TcpExt:", "TCPSynRetrans", &c.RepeatedSYNs},
			{"/proc/thread-self/net/snmp", "Tcp:", "ActiveOpens", &c.Opened},
			{"/proc/thread-self/net/snmp", "Tcp:", "OutRsts", &c.Resets},
		} {
			text, err := os.ReadFile(f.file)
			if err != nil {
				return err
			}
			if *f.to, err = counter(string(text), f.group, f.name); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return c, fmt.Errorf("read TCP counters of %s: %w", host.Name, err)
	}
	return c, nil
}

// counter reads a counter of a file like /proc/net/netstat: each group has a line of names and a line of
// values.
func counter(text, group, name string) (uint64, error) {
	var names []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != group {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		if i := slices.Index(names, name); i > 0 && i < len(fields) {
			return strconv.ParseUint(fields[i], 10, 64)
		}
		break
	}
	return 0, fmt.Errorf("no counter %s of %s", name, strings.TrimSuffix(group, ":"))
}

// Established returns how many TCP connections of a host to an address are open.
func Established(host *topology.Host, to netip.AddrPort) (n int, err error) {
	family := uint8(unix.AF_INET6)
	if to.Addr().Is4() {
		family = unix.AF_INET
	}
	err = host.Do(func() error {
		sockets, err := netlink.SocketDiagTCP(family)
		for _, s := range sockets {
			remote, _ := netip.AddrFromSlice(s.ID.Destination)
			if s.State == netlink.TCP_ESTABLISHED && netip.AddrPortFrom(remote.Unmap(), s.ID.DestinationPort) == to {
				n++
			}
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("read sockets of %s: %w", host.Name, err)
	}
	return n, nil
}
