package harness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"spillway.dev/spillway/test/testbed/topology"
)

// UseIptables makes the chain that kubelet makes in its variant of iptables, "legacy"
// or "nft": Spillway detects the variant by it. "" makes no chain.
func UseIptables(ctx context.Context, node *topology.Host, variant string) error {
	if variant == "" {
		return nil
	}
	cmd := node.Command(ctx, "iptables-"+variant+"-restore", "--noflush", "--wait")
	cmd.Stdin = strings.NewReader("*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("use iptables-%s: %w: %s", variant, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// IptablesPath returns a PATH in which "iptables" is that variant. kube-proxy does not
// choose a variant; its image does.
func (h *Harness) IptablesPath(variant string) (string, error) {
	dir := h.Path("iptables")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("make directory for iptables-%s: %w", variant, err)
	}
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, end := range []string{"", "-save", "-restore"} {
			program, err := exec.LookPath(base + "-" + variant + end)
			if err == nil {
				err = os.Symlink(program, dir+"/"+base+end)
			}
			if err != nil {
				return "", fmt.Errorf("use iptables-%s: %w", variant, err)
			}
		}
	}
	return dir + ":" + os.Getenv("PATH"), nil
}
