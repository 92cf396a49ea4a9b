package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/test/testbed/topology"
)

// almostEmpty is the number of entries that programs on a node may make by themselves.
const almostEmpty = 100

// ConntrackLimit returns how many entries each namespace of this machine may have.
func ConntrackLimit(node *topology.Host) (limit int, err error) {
	err = node.Do(func() error {
		text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max")
		if err == nil {
			limit, err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("read size of conntrack table: %w", err)
	}
	return limit, nil
}

// FillConntrack fills a node's conntrack table, except for the given number of free
// entries, with established flows. The kernel does not evict them for new ones.
func FillConntrack(ctx context.Context, node *topology.Host, free int) error {
	limit, err := ConntrackLimit(node)
	if err != nil {
		return err
	}
	cmd := node.Command(ctx, "conntrack", "--load-file", "-")
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	go func() {
		defer in.Close()
		writeFlows(in, limit-free)
	}()
	out, _ := cmd.CombinedOutput() // it ends with an error when the table is full
	count, err := node.ConntrackCount()
	if err != nil {
		return err
	}
	if count < limit-free-almostEmpty {
		return fmt.Errorf("fill conntrack table: it has %d entries, not %d: %.200s", count, limit-free, out)
	}
	return nil
}

// writeFlows writes n flows between unassigned addresses.
func writeFlows(w io.Writer, n int) {
	addr := netip.MustParseAddr("198.18.0.1")
	for i := range n {
		if i%1000 == 0 {
			addr = addr.Next()
		}
		_, err := fmt.Fprintf(w, "-A -p tcp -s %s -d 198.19.0.1 --sport %d --dport 5001 --state ESTABLISHED -u ASSURED -t 86400\n", addr,
			1024+i%1000)
		if err != nil {
			return
		}
	}
}

// EmptyConntrack flushes a node's table and waits until the kernel has deleted the
// entries: a flush only marks them.
func EmptyConntrack(ctx context.Context, node *topology.Host) error {
	for range 100 {
		if err := node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }); err != nil {
			return fmt.Errorf("empty conntrack table: %w", err)
		}
		if n, err := node.ConntrackCount(); err != nil || n < almostEmpty {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	return errors.New("empty conntrack table: entries stay")
}
