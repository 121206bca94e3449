package deploy

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

const manifestsDir = "kubernetes"

// manifestFiles are the paths of the manifests, without kustomize's own.
func manifestFiles(t testing.TB) []string {
	t.Helper()
	files, err := filepath.Glob(manifestsDir + "/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	files = slices.DeleteFunc(files, func(f string) bool { return filepath.Base(f) == "kustomization.yaml" })
	if len(files) == 0 {
		t.Fatal("there are no manifests")
	}
	return files
}

// checkManifests runs tools/manifests on a folder, and returns what it says and how it ended.
func checkManifests(t testing.TB, folder string) (string, error) {
	t.Helper()
	folder, err := filepath.Abs(folder)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "-C", "../tools/manifests", "run", ".", folder).CombinedOutput()
	return string(out), err
}

func TestTheManifestsAreWhatKubernetesKnows(t *testing.T) {
	t.Parallel()
	if out, err := checkManifests(t, manifestsDir); err != nil {
		t.Fatalf("tools/manifests: %v\n%s", err, out)
	}

	// It finds what is wrong, or else it would say nothing here.
	for name, change := range map[string]struct{ file, old, now, want string }{
		"a field that there is not": {"deployment.yaml", "readOnlyRootFilesystem:", "readonlyRootFilesystem:", `unknown field "spec.template.spec.containers[0].securityContext.readonlyRootFilesystem"`},
		"a field twice":             {"disruption.yaml", "  maxUnavailable: 1\n", "  maxUnavailable: 1\n  maxUnavailable: 2\n", `"maxUnavailable" already set`},
		"a wrong type":              {"services.yaml", "port: 8081,", "port: grpc,", "cannot unmarshal"},
		"a kind that there is not":  {"disruption.yaml", "kind: PodDisruptionBudget", "kind: PodDisruptionBudgets", "no kind"},
		"pods of nobody":            {"services.yaml", "selector: {app.kubernetes.io/name: weir}", "selector: {app: weir}", "service weir selects no pods"},
		"a volume of nothing":       {"deployment.yaml", "configMap: {name: weir-policies}", "configMap: {name: policies}", "no ConfigMap policies"},
		"pods that may become root": {"deployment.yaml", "runAsNonRoot: true", "runAsNonRoot: false", "not restricted: runAsNonRoot"},
		"a port of nobody":          {"services.yaml", "targetPort: grpc", "targetPort: rpc", "no container has a port rpc"},
	} {
		dir := t.TempDir()
		for _, file := range manifestFiles(t) {
			text := read(t, file)
			if filepath.Base(file) == change.file {
				if !strings.Contains(text, change.old) {
					t.Fatalf("%s has no %q", file, change.old)
				}
				text = strings.ReplaceAll(text, change.old, change.now)
			}
			if err := os.WriteFile(filepath.Join(dir, filepath.Base(file)), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if out, err := checkManifests(t, dir); err == nil || !strings.Contains(out, change.want) {
			t.Errorf("with %s tools/manifests ends with %v and says\n%s\nwant %s", name, err, out, change.want)
		}
	}
}

// What scrapes finds the replicas: by the service that has those that are not ready, too.
func TestPrometheusLooksWhereTheReplicasAre(t *testing.T) {
	var config struct {
		Jobs []struct {
			Name string `yaml:"job_name"`
			DNS  []struct {
				Names []string
				Port  int
			} `yaml:"dns_sd_configs"`
		} `yaml:"scrape_configs"`
	}
	if err := yaml.Unmarshal([]byte(read(t, "prometheus/scrape.yaml")), &config); err != nil {
		t.Fatal(err)
	}
	type service struct {
		Metadata struct{ Name string }
		Spec     struct {
			ClusterIP string `yaml:"clusterIP"`
			All       bool   `yaml:"publishNotReadyAddresses"`
			Ports     []struct{ Port int }
		}
	}
	namespace := manifest[struct{ Metadata struct{ Name string } }](t, "namespace.yaml", "Namespace", "").Metadata.Name
	where := config.Jobs[0].DNS[0]
	s := manifest[service](t, "services.yaml", "Service", "weir-replicas")
	if want := s.Metadata.Name + "." + namespace + ".svc.cluster.local"; config.Jobs[0].Name != "weir" || !slices.Equal(where.Names, []string{want}) {
		t.Errorf("the job %s looks at %v, want the job weir, and %s", config.Jobs[0].Name, where.Names, want)
	}
	if s.Spec.ClusterIP != "None" || !s.Spec.All || s.Spec.Ports[0].Port != where.Port {
		t.Errorf("the service is %+v, want it headless, with all replicas, and port %d", s.Spec, where.Port)
	}
}

func TestKustomizeHasEveryManifest(t *testing.T) {
	// Without its labels being yours, this one keeps Envoy away.
	optional := map[string]bool{"network.yaml": true}
	var k struct{ Resources []string }
	if err := yaml.Unmarshal([]byte(read(t, manifestsDir+"/kustomization.yaml")), &k); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, file := range manifestFiles(t) {
		if name := filepath.Base(file); !optional[name] {
			want = append(want, name)
		}
	}
	if got := slices.Sorted(slices.Values(k.Resources)); !slices.Equal(got, want) {
		t.Errorf("kustomization.yaml has %v, want %v", got, want)
	}
}

// deployment is what the tests read of deployment.yaml.
type deployment struct {
	Spec struct {
		Replicas int
		Strategy struct {
			RollingUpdate struct {
				MaxSurge int `yaml:"maxSurge"`
			} `yaml:"rollingUpdate"`
		}
		Template struct {
			Spec struct {
				Grace      int `yaml:"terminationGracePeriodSeconds"`
				Containers []struct {
					Args      []string
					Readiness struct {
						HTTP struct{ Path, Port string } `yaml:"httpGet"`
					} `yaml:"readinessProbe"`
					Lifecycle struct {
						PreStop struct{ Sleep struct{ Seconds int } } `yaml:"preStop"`
					}
					Mounts []struct {
						Name string
						Path string `yaml:"mountPath"`
					} `yaml:"volumeMounts"`
				}
			}
		}
	}
}

// manifest decodes an object of a file: the first of the kind, with that name if it is not empty.
func manifest[T any](t testing.TB, file, kind, name string) (object T) {
	t.Helper()
	documents := yaml.NewDecoder(strings.NewReader(read(t, filepath.Join(manifestsDir, file))))
	for {
		var document yaml.Node
		if err := documents.Decode(&document); errors.Is(err, io.EOF) {
			t.Fatalf("%s has no %s", file, kind)
		} else if err != nil {
			t.Fatal(err)
		}
		var is struct {
			Kind     string
			Metadata struct{ Name string }
		}
		if err := document.Decode(&is); err != nil {
			t.Fatal(err)
		}
		if is.Kind == kind && (name == "" || is.Metadata.Name == name) {
			if err := document.Decode(&object); err != nil {
				t.Fatal(err)
			}
			return object
		}
	}
}

// What the manifests run, runs: with their arguments, their policies and a Redis that wants the
// password of their Secret.
func TestWhatTheManifestsRunDecides(t *testing.T) {
	t.Parallel()
	const password = "of-redis"
	redis := storetest.StartRedis(t, storetest.AnyRedis(t), "--requirepass", password)
	d := manifest[deployment](t, "deployment.yaml", "Deployment", "")
	c := d.Spec.Template.Spec.Containers[0]

	// The folders of the container, with what Kubernetes would put there.
	root := t.TempDir()
	files := map[string]map[string]string{
		"policies": manifest[struct{ Data map[string]string }](t, "policies.yaml", "ConfigMap", "").Data,
		"secrets":  {"redis-password": password + "\n", "hash-key": strings.Repeat("k", 64) + "\n"},
	}
	for _, mount := range c.Mounts {
		dir := filepath.Join(root, mount.Path)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for name, text := range files[mount.Name] {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if c.Args[0] != "serve" {
		t.Fatalf("the container runs %v, want serve", c.Args)
	}
	var flags []string
	seen := make(map[string]string)
	for _, arg := range c.Args[1:] {
		name, value, _ := strings.Cut(arg, "=")
		seen[name] = value
		switch {
		case name == "--redis":
			value = redis.URL
		case name == "--log-format": // the test reads the text format
			continue
		case strings.HasPrefix(value, "/"):
			value = filepath.Join(root, value)
		}
		flags = append(flags, name+"="+value)
	}
	flags = append(flags, "--store-timeout=1s")
	p := servertest.Start(t, "domain: other\ndescriptors: [{key: a, token_bucket: {capacity: 1, refill: 1/s}}]\n", flags...)
	storetest.Eventually(t, "it is ready, as the probe asks", func() bool {
		code, _ := p.Get(t, c.Readiness.HTTP.Path)
		return code == 200
	})
	leases := weirv1.NewLeaseServiceClient(p.Dial(t))
	if a := ask(t, leases, "inference", "", "account=a", "pool=images"); !a.GetAdmitted() || a.GetLease().GetId() == "" || a.GetBypassReason() != "" {
		t.Errorf("it decided %v, want a lease of the store", a)
	}
	_, metrics := p.Get(t, "/metrics")
	for _, want := range []string{"weir_policy_wrong_files 0\n", "weir_store_up 1\n"} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics has no %s", want)
		}
	}
	if _, health := p.Get(t, "/healthz"); !strings.Contains(health, `"api"`) || !strings.Contains(health, `"inference"`) {
		t.Errorf("/healthz tells %s, want the domains api and inference", health)
	}

	// A stop has the time that it may take.
	const cutOff, traces = 2, 2 // seconds, of cmd/weir
	drain := 10
	if v := seen["--drain-timeout"]; v != "" {
		timeout, err := time.ParseDuration(v)
		if err != nil {
			t.Fatal(err)
		}
		drain = int(timeout.Seconds())
	}
	if need := c.Lifecycle.PreStop.Sleep.Seconds + drain + cutOff + traces; d.Spec.Template.Spec.Grace < need {
		t.Errorf("terminationGracePeriodSeconds is %d, and a stop may take %d", d.Spec.Template.Spec.Grace, need)
	}
	if n, err := strconv.Atoi(seen["--replicas"]); err != nil || n != d.Spec.Replicas+d.Spec.Strategy.RollingUpdate.MaxSurge {
		t.Errorf("--replicas=%s, want %d and %d more during an update", seen["--replicas"], d.Spec.Replicas, d.Spec.Strategy.RollingUpdate.MaxSurge)
	}
	p.Terminate(t)
	if code := p.Wait(t); code != 0 {
		t.Errorf("at SIGTERM it ended with %d, want 0", code)
	}
}
