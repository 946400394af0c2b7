"""x"""
import json, subprocess, sys, os, tempfile, time, socket, random
from pathlib import Path
HERE=Path(__file__).with_name("control_load_cases.py")
PY=[sys.executable,"-P",str(HERE)]
NODES=12500; SPARES=20; AGG=25; GEN=4
def spawn(*a,**k): return subprocess.Popen([*PY,*map(str,a)],stdin=subprocess.PIPE,stdout=subprocess.PIPE,text=True,bufsize=1,**k)
def ask(c):
    c.stdin.write("\n"); c.stdin.flush(); return json.loads(c.stdout.readline())
def cpu(pids):
    t=0
    for p in pids:
        f=Path(f"/proc/{p}/stat").read_text().rsplit(")",1)[1].split(); t+=int(f[11])+int(f[12])
    return t/os.sysconf("SC_CLK_TCK")
procs=[]
try:
    d=tempfile.mkdtemp(dir="/tmp/p2"); sec=f"{d}/secret"
    c=spawn("control",d,sec,0); procs.append(c)
    host,port=json.loads(c.stdout.readline())
    aggs=[spawn("aggregate",sec,f"r{i}",host,port) for i in range(AGG)]; procs+=aggs
    addr=[json.loads(a.stdout.readline()) for a in aggs]
    n=NODES+SPARES
    gens=[]
    for g in range(GEN):
        p=spawn("generate",d,g,GEN,sec); procs.append(p); gens.append(p)
        mine=list(range(g,n,GEN))
        p.stdin.write(json.dumps({"nodes":mine,"addresses":[addr[i*AGG//n] for i in mine]})+"\n"); p.stdin.flush()
    t0=time.monotonic()
    while True:
        time.sleep(1); a=ask(c); print(round(time.monotonic()-t0,1),a['phase'],a['generation'],a['reports'],a['commands'],round(a['cpu_s'],2),flush=True)
        if a['phase']=='running' or time.monotonic()-t0>90: break
    # measure idle
    def window(sec,plan,label):
        buss=socket.socket(socket.AF_UNIX,socket.SOCK_DGRAM)
        if plan:
            for g in range(GEN): buss.sendto(json.dumps({"plan":plan}).encode(),f"{d}/generator-{g}")
        a=ask(c); ca,cg=cpu([x.pid for x in aggs]),cpu([x.pid for x in gens])
        time.sleep(sec)
        b=ask(c); w=b['now_s']-a['now_s']
        lat=sorted(x[2] for x in b['latencies']); print([(k,round(x),round(y)) for k,x,y in b['latencies']][:60])
        q=lambda f: round(lat[min(len(lat)-1,int(f*len(lat)))],1) if lat else None
        print(label,'ctl',round((b['cpu_s']-a['cpu_s'])/w,3),'aggs',round((cpu([x.pid for x in aggs])-ca)/w,3),'gens',round((cpu([x.pid for x in gens])-cg)/w,3),'gen',b['generation']-a['generation'],b['phase'],'reports',b['reports']-a['reports'],'dec',len(lat),'p50',q(.5),'p99',q(.99),'max',q(1),'entries',b['entries']-a['entries'],flush=True)
    window(10,[],'steady')
    now=time.monotonic()
    window(15,[[now+1.0,'worker',77]],'one worker')
    now=time.monotonic()
    rnd=random.Random(1)
    plan=[]
    for i in range(5):
        k=rnd.randrange(NODES); plan.append([now+1+6*i,'worker' if i%2 else 'node',k]); plan.append([now+26+6*i,'back',k])
    window(30,plan,'10/min')
    window(30,[],'after')
    print(os.path.getsize(f"{d}/journal.db")/1e6, [ (x.name,x.stat().st_size) for x in Path(d).glob('journal*')])
finally:
    for p in procs: p.kill()
