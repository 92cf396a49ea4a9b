package intent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Validate returns an error that names the flag of the first wrong field.
func (c Config) Validate() error {
	if c.NodeName == "" {
		return errors.New("the node's name is empty: set --hostname-override")
	}
	if err := validatePrefixes("--nodeport-addresses", c.NodePortAddresses); err != nil {
		return err
	}
	if err := validatePrefixes("--cluster-cidr", c.ClusterCIDRs); err != nil {
		return err
	}
	return c.validateLocal()
}

func (c Config) validateLocal() error {
	switch c.DetectLocal {
	case "", LocalClusterCIDR, LocalNodeCIDR:
		return nil
	case LocalBridgeInterface:
		if c.LocalInterface == "" {
			return errors.New("--detect-local-mode BridgeInterface: no bridge named: set --pod-bridge-interface")
		}
	case LocalInterfaceNamePrefix:
		if c.LocalInterface == "" {
			return errors.New("--detect-local-mode InterfaceNamePrefix: no prefix named: set --pod-interface-name-prefix")
		}
	default:
		return fmt.Errorf("--detect-local-mode %q: not a mode: use %s, %s, %s or %s", c.DetectLocal,
			LocalClusterCIDR, LocalNodeCIDR, LocalBridgeInterface, LocalInterfaceNamePrefix)
	}
	return nil
}

func validatePrefixes(flag string, prefixes []netip.Prefix) error {
	for i, p := range prefixes {
		if !p.IsValid() {
			return fmt.Errorf("%s: entry %d is not an address range: write it as 10.0.0.0/8", flag, i)
		}
	}
	return nil
}

// canonicalPrefixes masks and sorts prefixes, and removes duplicates and invalid ones. It
// distinguishes nil from empty.
func canonicalPrefixes(prefixes []netip.Prefix) []netip.Prefix {
	if prefixes == nil {
		return nil
	}
	out := make([]netip.Prefix, 0, len(prefixes))
	for _, p := range prefixes {
		if p.IsValid() {
			out = append(out, p.Masked())
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out)
}
