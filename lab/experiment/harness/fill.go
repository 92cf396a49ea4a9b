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

	"spillway.dev/spillway/lab/topology"
)

// almostEmpty is how many entries what runs on a node may make by itself.
const almostEmpty = 100

// ConntrackLimit is how many entries each namespace of this machine may have.
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

// FillConntrack fills a node's conntrack table with established flows of others,
// which the kernel does not give up for new ones, but for so many free entries.
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

// writeFlows writes so many flows that nobody has.
func writeFlows(w io.Writer, n int) {
	addr := netip.MustParseAddr("198.18.0.1")
	for i := range n {
		if i%1000 == 0 {
			addr = addr.Next()
		}
		_, err := fmt.Fprintf(w, "-A -p tcp -s %s -d 198.19.0.1 --sport %d --dport 5001 --state ESTABLISHED -u ASSURED -t 86400\n", addr, 1024+i%1000)
		if err != nil {
			return
		}
	}
}

// EmptyConntrack flushes a node's table and waits until its entries are gone, and
// not only marked.
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
