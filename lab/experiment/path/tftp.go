package path

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/lab/workload"
)

const (
	metalTFTPPort = 8069
	tftpPort      = 69
)

// plans lists the comparisons of a run.
func (b *bench) plans() []plan {
	if b.cfg.TFTP {
		return b.tftpPlans()
	}
	return plans(b.rig.Cluster)
}

// tftpPlans lists those of files.
func (b *bench) tftpPlans() []plan {
	c := b.rig.Cluster
	client, node := c.Client(0), c.Node(0)
	return []plan{
		{name: "NodePort, pod on this node ÷ metal", kind: load.TFTP, control: true, target: &experiment.Target{Limit: 0.95},
			base:    way{client, netip.AddrPortFrom(node.IPv4, metalTFTPPort)},
			service: way{client, netip.AddrPortFrom(node.IPv4, hereNodePort)}},
		{name: "NodePort, pod on other node ÷ pod address", kind: load.TFTP, target: &experiment.Target{Limit: 0.85},
			base:    way{client, netip.AddrPortFrom(c.Pod(1, 0).IPv4, tftpPort)},
			service: way{client, netip.AddrPortFrom(node.IPv4, thereNodePort)}},
	}
}

// waitAnswer waits until a way is open.
func (b *bench) waitAnswer(ctx context.Context, w way) error {
	if !b.cfg.TFTP {
		return b.rig.WaitAnswer(ctx, w.from, workload.HTTP, w.to)
	}
	const tries = 20
	for range tries {
		r, err := b.rig.Load(ctx, w.from, load.Config{Kind: load.TFTP, Target: w.to, Connections: 1, Duration: 100 * time.Millisecond})
		if err != nil {
			return err
		}
		if r.Requests > 0 {
			return nil
		}
	}
	return fmt.Errorf("wait for %s to answer %s: no file after %d tries", w.to, w.from.Name, tries)
}
