// Command manifests checks the Kubernetes manifests of a folder without a cluster: that
// each object is of a known kind and version and has no field that Kubernetes does not know,
// as strictly as its API server, that what they name of each other is there, and that the pods
// may run in a namespace that enforces the standard "restricted".
//
//	go run . FOLDER
//
// It does not know what else is wrong with a value that has the right type.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/yaml"
	psaapi "k8s.io/pod-security-admission/api"
	psa "k8s.io/pod-security-admission/policy"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: manifests FOLDER")
		os.Exit(2)
	}
	all, err := read(os.Args[1])
	if err == nil {
		err = all.check()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(all.objects, "objects are right")
}

// manifests are the objects of a folder that name each other.
type manifests struct {
	objects     int
	deployments []*appsv1.Deployment
	configs     map[string]bool                  // names of ConfigMaps
	selectors   map[string]*metav1.LabelSelector // by who selects; each must select a deployment's pods
	ports       map[string][]intstr.IntOrString  // by who names them
}

// read decodes all files but that of kustomize, which is of no API.
func read(folder string) (*manifests, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, corev1.AddToScheme, networkingv1.AddToScheme, policyv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, json.SerializerOptions{Yaml: true, Strict: true})
	files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
	if err != nil {
		return nil, err
	}
	m := &manifests{configs: make(map[string]bool), selectors: make(map[string]*metav1.LabelSelector), ports: make(map[string][]intstr.IntOrString)}
	var wrong []error
	for _, file := range files {
		if filepath.Base(file) == "kustomization.yaml" {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		documents := yaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(text)))
		for {
			document := make([]byte, len(text))
			n, err := documents.Read(document)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			object, _, err := decoder.Decode(document[:n], nil, nil)
			if err != nil {
				wrong = append(wrong, fmt.Errorf("%s: %w", file, err))
				continue
			}
			m.add(object)
		}
	}
	if len(wrong) == 0 && m.objects == 0 {
		return nil, fmt.Errorf("%s has no objects", folder)
	}
	return m, errors.Join(wrong...)
}

func (m *manifests) add(object runtime.Object) {
	m.objects++
	switch o := object.(type) {
	case *appsv1.Deployment:
		m.deployments = append(m.deployments, o)
		m.selectors["deployment "+o.Name] = o.Spec.Selector
		for _, c := range o.Spec.Template.Spec.TopologySpreadConstraints {
			m.selectors["spread over "+c.TopologyKey] = c.LabelSelector
		}
	case *corev1.ConfigMap:
		m.configs[o.Name] = true
	case *corev1.Service:
		m.selectors["service "+o.Name] = &metav1.LabelSelector{MatchLabels: o.Spec.Selector}
		for _, p := range o.Spec.Ports {
			m.ports["service "+o.Name] = append(m.ports["service "+o.Name], p.TargetPort)
		}
	case *policyv1.PodDisruptionBudget:
		m.selectors["budget "+o.Name] = o.Spec.Selector
	case *networkingv1.NetworkPolicy:
		m.selectors["network "+o.Name] = &o.Spec.PodSelector
		for _, in := range o.Spec.Ingress {
			for _, p := range in.Ports {
				m.ports["network "+o.Name] = append(m.ports["network "+o.Name], *p.Port)
			}
		}
	}
}

// check tells what is named and not there.
func (m *manifests) check() error {
	var wrong []error
	add := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	for _, who := range slices.Sorted(maps.Keys(m.selectors)) {
		selector, err := metav1.LabelSelectorAsSelector(m.selectors[who])
		if err != nil {
			return err
		}
		if selector.Empty() || !slices.ContainsFunc(m.deployments, func(d *appsv1.Deployment) bool {
			return selector.Matches(labels.Set(d.Spec.Template.Labels))
		}) {
			add("%s selects no pods: %v", who, selector)
		}
	}
	pods, err := psa.NewEvaluator(psa.DefaultChecks(), nil)
	if err != nil {
		return err
	}
	restricted := psaapi.LevelVersion{Level: psaapi.LevelRestricted, Version: psaapi.LatestVersion()}
	named := make(map[string]bool) // ports of containers
	for _, d := range m.deployments {
		template := &d.Spec.Template
		if r := psa.AggregateCheckResults(pods.EvaluatePod(restricted, &template.ObjectMeta, &template.Spec)); !r.Allowed {
			add("deployment %s: its pods are not restricted: %s", d.Name, r.ForbiddenDetail())
		}
		volumes := make(map[string]bool)
		for _, v := range d.Spec.Template.Spec.Volumes {
			volumes[v.Name] = true
			if c := v.ConfigMap; c != nil && !m.configs[c.Name] {
				add("deployment %s: there is no ConfigMap %s", d.Name, c.Name)
			}
		}
		for _, c := range d.Spec.Template.Spec.Containers {
			own := make(map[string]bool)
			for _, p := range c.Ports {
				own[p.Name], named[p.Name] = true, true
			}
			for _, v := range c.VolumeMounts {
				if !volumes[v.Name] {
					add("deployment %s: there is no volume %s", d.Name, v.Name)
				}
			}
			for _, probe := range []*corev1.Probe{c.ReadinessProbe, c.LivenessProbe, c.StartupProbe} {
				if probe != nil && probe.HTTPGet != nil && !own[probe.HTTPGet.Port.StrVal] {
					add("deployment %s: a probe asks port %s, which the container has not", d.Name, probe.HTTPGet.Port.String())
				}
			}
		}
	}
	for _, who := range slices.Sorted(maps.Keys(m.ports)) {
		for _, p := range m.ports[who] {
			if !named[p.StrVal] {
				add("%s: no container has a port %s", who, p.String())
			}
		}
	}
	return errors.Join(wrong...)
}
